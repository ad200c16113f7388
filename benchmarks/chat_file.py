"""Generate the chat file that benchmarks read, and a tokenizer for it: the same bytes for the same rows and seed.

Rows are `messages` of 1 to 4 turns, 30 % of them Chinese, log-normal in length with a tail past 4096 tokens, some with
code, some with tool calls. A longer file starts with the rows of a shorter one. The files are below scratch/bench, and
are generated again only if their size, their seed or this code changes.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from benchmarks.chat_text import Language, chinese, code, english
from benchmarks.processes import SCRATCH
from data.synth.tokenizer import train_bpe
from lean_finetune.core.atomic_files import atomic_directory, atomic_path, sha256_json

SEED = 11
CHUNK_ROWS = 1000
"""Rows generated from one random state."""
CHINESE_SHARE, SYSTEM_SHARE, CODE_SHARE, TOOL_SHARE = 0.3, 0.3, 0.08, 0.04
TURN_SHARES = (0.55, 0.25, 0.12, 0.08)
"""Shares of rows with 1, 2, 3, 4 turns of a user and an assistant."""
MEDIAN_WORDS = {"english": 104, "chinese": 92}
"""Median words of a row: about the same number of tokens in both languages."""
SIGMA = 1.1
"""Standard deviation of the logarithm of a row's length: about one row in 1000 exceeds 4096 tokens."""
VOCABULARY_SIZE = 32_000
TRAINING_ROWS = 6_000
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
# The pre-tokenizer of the Llama 3 family: words, numbers of up to three digits, punctuation, white space.
PRE_TOKENIZER = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
            {{- message.content or '' }}
            {%- for call in message.tool_calls or [] %}
                {{- '<tool_call>' + call.function.name + ' ' }}
                {%- if call.function.arguments is string %}
                    {{- call.function.arguments }}
                {%- else %}
                    {{- call.function.arguments | tojson }}
                {%- endif %}
                {{- '</tool_call>' }}
            {%- endfor %}
            {{- '<|im_end|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


@dataclass(frozen=True, kw_only=True)
class ChatFile:
    """A generated file and the tokenizer trained on its first rows."""

    path: Path
    rows: int
    model: Path
    """A directory with its tokenizer, its chat template, and a tiny model."""


def chat_file(rows: int, seed: int = SEED, training_rows: int | None = None) -> ChatFile:
    """The file of `rows` rows, and a tokenizer that does not depend on their number; made where missing.

    The tokenizer is trained on TRAINING_ROWS rows of the seed's, or on `training_rows`.
    """
    training_rows = TRAINING_ROWS if training_rows is None else training_rows
    tokenizer = SCRATCH / f"tokenizer-{_key(seed)}-{training_rows}"
    if not tokenizer.exists():
        with atomic_directory(tokenizer) as aside:
            _save_model(train_tokenizer(seed, training_rows), aside)
    path = SCRATCH / f"chat-{_key(seed)}" / f"{rows}.jsonl"
    if not path.exists():
        with atomic_path(path) as aside, open(aside, "wb") as file:
            for row in generate(rows, seed):
                file.write(json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")
    return ChatFile(path=path, rows=rows, model=tokenizer)


def lengths(rows: int, seed: int = SEED) -> np.ndarray:
    """Tokens of each row of that file, not truncated, int32. They are cached in a file next to it."""
    source = chat_file(rows, seed)
    path = source.path.with_suffix(".lengths.npy")
    if not path.exists():
        tokenizer = Tokenizer.from_file(str(source.model / "tokenizer.json"))
        counts = []
        for texts in rendered(source):
            encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            counts.append(np.fromiter((len(one.ids) for one in encoded), np.int32, len(encoded)))
        with atomic_path(path) as aside, open(aside, "wb") as file:
            np.save(file, np.concatenate(counts))
    return np.load(path)


def rendered(source: ChatFile) -> Iterator[list[str]]:
    """The rows' text after the chat template, as transformers renders it, in lists of up to CHUNK_ROWS."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.model)
    with open(source.path, "rb") as file:
        while lines := [line for _, line in zip(range(CHUNK_ROWS), file, strict=False)]:
            chats = [json.loads(line)["messages"] for line in lines]
            texts: Any = tokenizer.apply_chat_template(chats, tokenize=False)
            yield texts


def generate(rows: int, seed: int) -> Iterator[dict[str, Any]]:
    """The rows themselves."""
    languages = _languages(seed)
    for start in range(0, rows, CHUNK_ROWS):
        rng = _rng(seed, 2, start)
        for _ in range(min(CHUNK_ROWS, rows - start)):
            yield _row(rng, languages)


@cache
def _languages(seed: int) -> dict[str, Language]:
    """The languages of a seed, cached because they take half a second."""
    return {"english": english(_rng(seed, 0)), "chinese": chinese(_rng(seed, 1))}


def train_tokenizer(seed: int, training_rows: int) -> Tokenizer:
    """A byte-level BPE trained on the first rows of a file long enough."""
    rows = generate(training_rows, seed)
    texts = (message["content"] for row in rows for message in row["messages"])
    return train_bpe(texts, PRE_TOKENIZER, VOCABULARY_SIZE, SPECIAL_TOKENS)


def _row(rng: np.random.Generator, languages: dict[str, Language]) -> dict[str, Any]:
    """One conversation."""
    name = "chinese" if rng.random() < CHINESE_SHARE else "english"
    language = languages[name]
    turns = 1 + int(np.searchsorted(np.cumsum(TURN_SHARES[:-1]), rng.random()))
    words = max(8 * turns, round(MEDIAN_WORDS[name] * float(np.exp(SIGMA * rng.standard_normal()))))
    messages: list[dict[str, Any]] = []
    if rng.random() < SYSTEM_SHARE:
        messages.append({"role": "system", "content": language.write(rng, 12)})
    with_code, with_tool = rng.random() < CODE_SHARE, rng.random() < TOOL_SHARE
    for _ in range(turns):
        question_words = max(2, round(words / turns * (0.1 + 0.3 * rng.random())))
        messages.append({"role": "user", "content": language.write(rng, question_words)})
        if with_tool:
            messages += _tool_call(rng, language)
        answer = language.write(rng, max(4, words // turns - question_words))
        if with_code:
            answer += "\n\n" + code(rng, 2 + int(rng.random() * 12))
        messages.append({"role": "assistant", "content": answer})
    return {"messages": messages}


def _tool_call(rng: np.random.Generator, language: Language) -> list[dict[str, Any]]:
    """A call and its result."""
    arguments = json.dumps({"query": language.write(rng, 4), "limit": int(rng.integers(1, 50))}, ensure_ascii=False)
    function = {"name": f"search_{int(rng.integers(0, 20))}", "arguments": arguments}
    return [
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": language.write(rng, 15)},
    ]


def _save_model(tokenizer: Tokenizer, directory: Path) -> None:
    """Write the tokenizer's files and the config of a tiny model, as stages and rivals need them."""
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>",
        "model_max_length": 1 << 20,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    model = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    (directory / "config.json").write_text(json.dumps(model, indent=2) + "\n", encoding="utf-8")
    # Stage pin_model requires weights; no stage of this benchmark reads them.
    save_file({"unused": np.zeros(1, np.float32)}, directory / "model.safetensors")


def _key(seed: int) -> str:
    """Hash of what decides the rows: the seed and the code that generates them."""
    sources = [Path(__file__), Path(__file__).with_name("chat_text.py")]
    return sha256_json([seed, [hashlib.sha256(source.read_bytes()).hexdigest() for source in sources]])[:12]


def _rng(*key: int) -> np.random.Generator:
    """A random generator that depends on the key only."""
    return np.random.default_rng(np.random.SeedSequence(key))
