"""Small tokenizers in the styles of the families that people fine-tune, trained here on the sample."""

import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tests.conftest import ROOT

# The patterns match contractions, letters with a preceding character, numbers, punctuation, white space.
_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_PATTERN = rf"{_LETTERS}|\p{{N}}{{1,3}}|{_OTHERS}"
QWEN2_PATTERN = rf"{_LETTERS}|\p{{N}}|{_OTHERS}"
CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SENTENCEPIECE_TOKENS = ("<unk>", "<s>", "</s>")


def sample_texts() -> Iterator[str]:
    """The shipped rows' text, and what it lacks."""
    with open(ROOT / "data/raw/sample.jsonl", encoding="utf-8") as file:
        for _, line in zip(range(200), file, strict=False):
            yield from (message["content"] for message in json.loads(line)["messages"])
    yield from [
        "你好，世界。今天天气很好！",
        "I'm sure you're right; they'll see, he'd say.",
        "a\n\nb\r\n  c   d 2024 10 000",
    ] * 20


def byte_level(style: str) -> Tokenizer:
    """A byte-level BPE as of GPT-2, Llama 3 or Qwen 2."""
    tokenizer = Tokenizer(models.BPE())
    byte_pairs = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=style == "gpt2")
    if style == "gpt2":
        tokenizer.pre_tokenizer = byte_pairs
    else:
        pattern = {"llama3": LLAMA3_PATTERN, "qwen2": QWEN2_PATTERN}[style]
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_pairs])
    if style == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True, normalized=False) for token in CHATML_TOKENS]
    if style == "llama3":
        special += [AddedToken(f"<|reserved_special_token_{n}|>", special=True, normalized=False) for n in range(250)]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=800, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(sample_texts(), trainer)
    tokenizer.model.ignore_merges = style == "llama3"
    if style == "qwen2":
        tokenizer.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    return tokenizer


def sentencepiece(style: str) -> Tokenizer:
    """A BPE with a mark for spaces and bytes for unknown characters, as of Mistral, Llama 2 or Gemma."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    if style == "mistral":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        spaces = normalizers.Replace(" ", "▁")
        steps = [normalizers.Prepend("▁"), spaces] if style == "llama2" else [spaces]
        tokenizer.normalizer = normalizers.Sequence(steps)
    # Trained on words, so that no token is longer than one.
    words = Tokenizer(models.BPE(unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=list(SENTENCEPIECE_TOKENS), show_progress=False)
    words.train_from_iterator(sample_texts(), trainer)
    model = json.loads(words.to_str())["model"]
    vocabulary = dict(model["vocab"])
    for byte in range(256):
        vocabulary.setdefault(f"<0x{byte:02X}>", len(vocabulary))
    tokenizer.model = models.BPE(
        vocab=vocabulary,
        merges=[tuple(merge) for merge in model["merges"]],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    strip = [decoders.Strip(" ", 1, 0)] if style != "gemma" else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SENTENCEPIECE_TOKENS])
    return tokenizer


def save(tokenizer: Tokenizer, directory: Path, **config: str) -> Path:
    """A model directory with that tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory
