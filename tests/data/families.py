"""Tokenizers in the styles of published model families, and what their unmarked chat templates train."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from lean_finetune.data.chat.chat_template import ChatTemplate, load_template
from lean_finetune.data.chat.control_tokens import TextSegment
from lean_finetune.data.format.format_base import Conversation
from tests.data.common import DATE

TEMPLATES = Path(__file__).parent / "templates"
LLAMA = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>")
TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
# As Kimi K2's: a block of its own, with the reasoning of a separate key.
OWN_BLOCK = TURNS.replace(
    "{{ m.content }}",
    "{% if m.role == 'assistant' %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}",
)
MISTRAL = ("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]")


@dataclass(frozen=True, kw_only=True)
class Family:
    """A style of template, and what of a plain answer the model has to learn."""

    control: tuple[str, ...]
    eos: str
    answer: Callable[[str, bool], str]
    """The trained text of an answer, by its text and whether it is the conversation's last."""
    bos: str | None = "<s>"
    takes_system: bool = True

    @property
    def special_tokens(self) -> dict[str, str]:
        """What tokenizer_config.json names."""
        return {"eos_token": self.eos} | ({"bos_token": self.bos} if self.bos else {})


def _qwen3(answer: str, last: bool) -> str:
    before, end, content = answer.rpartition("</think>")
    thought = before.split("</think>")[0].rstrip("\n").split("<think>")[-1].strip("\n") if end else ""
    content = content.lstrip("\n") if end else answer
    return (f"<think>\n{thought}\n</think>\n\n" + content.lstrip("\n") if last else content) + "<|im_end|>"


IM = ("<|im_start|>", "<|im_end|>")
FAMILIES = {
    "chatml": Family(control=IM, eos="<|im_end|>", bos=None, answer=lambda text, last: f"{text}<|im_end|>"),
    "qwen2.5": Family(control=IM, eos="<|im_end|>", bos=None, answer=lambda text, last: f"{text}<|im_end|>"),
    "qwen3": Family(control=IM, eos="<|im_end|>", bos=None, answer=_qwen3),
    "llama-3": Family(control=LLAMA, eos="<|eot_id|>", answer=lambda text, last: f"{text.strip()}<|eot_id|>"),
    "llama-3.1": Family(control=LLAMA, eos="<|eot_id|>", answer=lambda text, last: f"{text.strip()}<|eot_id|>"),
    "mistral": Family(control=MISTRAL, eos="</s>", answer=lambda text, last: f" {text}</s>"),
    "mistral-tools": Family(
        control=MISTRAL, eos="</s>", answer=lambda text, last: f" {text.strip()}</s>", takes_system=False
    ),
    "gemma": Family(
        control=("<start_of_turn>", "<end_of_turn>"),
        eos="<eos>",
        bos="<bos>",
        answer=lambda text, last: f"{text.strip()}<end_of_turn>",
    ),
    "zephyr": Family(control=(), eos="</s>", answer=lambda text, last: f"{text}</s>"),
}


def template_source(name: str) -> str:
    """The family's published template, which has no generation marks."""
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


def save_tokenizer(directory: Path, name: str) -> Path:
    """A tokenizer of single bytes with the family's control tokens and template, as transformers would save it."""
    family = FAMILIES[name]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    named = [token for token in (family.bos, family.eos, "<pad>") if token]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True) for token in dict.fromkeys((*named, *family.control))]
    )
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config: dict[str, Any] = {
        **family.special_tokens,
        "pad_token": "<pad>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "chat_template": template_source(name),
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def open_family(directory: Path, name: str, train_on: str = "assistant", template: str = "tokenizer") -> ChatTemplate:
    return load_template(template, directory, FAMILIES[name].special_tokens, train_on, DATE)


def turn(role: str, content: str, **others: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **others}


def chat(*texts: str, system: str | None = None, **fields: str) -> Conversation:
    """Alternating questions and answers; every answer has the fields."""
    messages = [turn("assistant", text, **fields) if n % 2 else turn("user", text) for n, text in enumerate(texts)]
    return Conversation(messages=([turn("system", system)] if system else []) + messages, tools=None)


def trained(segments: list[TextSegment]) -> list[str]:
    return [segment.text for segment in segments if segment.trained]
