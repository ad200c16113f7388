"""The engine that uses tiktoken for a byte-level BPE of tokenizer.json.

tiktoken is several times as fast as tokenizers.
Every part of tokenizer.json that affects ids is checked. A part that tiktoken lacks is refused.
"""

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from cuda_memory.units import counted
from lean_finetune.data.chat.control_tokens import TRAINED_START, any_of
from lean_finetune.data.encode.tokenizers_engine import EncodedTexts, Engine

# The pattern of ByteLevel with use_regex, as in GPT-2.
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Short texts such as headers of turns repeat often, so their ids are cached.
CACHED_CHARACTERS = 24
CACHED_TEXTS = 1 << 13
BYTES_PER_ID = 4
NONE_ALLOWED: frozenset[str] = frozenset()


class NotEquivalent(Exception):
    """The reason why tiktoken would give other ids."""


class TiktokenEngine:
    """Encodes with tiktoken, and with a fallback engine where tiktoken fails."""

    def __init__(self, spec: dict[str, Any], fallback: Engine):
        """Build the engine from the content of tokenizer.json.

        Raises NotEquivalent if the tokenizer has a part that tiktoken lacks.
        """
        import tiktoken

        self._fallback, self.tokenizer = fallback, fallback.tokenizer
        self._normalize = _normalizer(spec["normalizer"])
        self._cache = _added_tokens(spec)
        """Ids as int32 bytes, of added tokens and of short texts so far."""
        ranks = ranks_of(spec)
        encoding = tiktoken.Encoding(
            "tokenizer.json",
            pat_str=_pattern(spec["pre_tokenizer"]),
            mergeable_ranks=ranks,
            # Without a special token tiktoken would search for an empty one. Guard keeps this character out of texts.
            special_tokens={TRAINED_START: max(*ranks.values(), *(one["id"] for one in spec["added_tokens"])) + 1},
        )
        self._encode = encoding._core_bpe.encode_to_tiktoken_buffer
        self._split = re.compile(f"({any_of(self._cache)})").split if self._cache else None

    def encode(self, texts: Sequence[str]) -> EncodedTexts:
        """See `Engine.encode`."""
        chunks: list[bytes] = []
        failed: list[int] = []
        for place, text in enumerate(texts):
            try:
                chunks.append(self._bytes(text))
            except ValueError:  # Its regular expressions fail on some texts, such as a million spaces.
                chunks.append(self._fallback.encode([text]).values.tobytes())
                failed.append(place)
        lengths = np.fromiter(map(len, chunks), np.int64, len(chunks)) // BYTES_PER_ID
        return EncodedTexts(np.frombuffer(b"".join(chunks), np.int32), lengths, failed)

    def _bytes(self, text: str) -> bytes:
        """The ids of a text as int32."""
        cache = self._cache
        if len(text) <= CACHED_CHARACTERS and text in cache:
            return cache[text]
        parts = [text] if self._split is None else self._split(text)
        return b"".join([cache[part] if part in cache else self._ordinary(part) for part in parts])

    def _ordinary(self, text: str) -> bytes:
        """The ids of text without added tokens."""
        normal = text if self._normalize is None or text.isascii() else self._normalize(text)
        ids = bytes(self._encode(normal, NONE_ALLOWED))
        if len(text) <= CACHED_CHARACTERS and len(self._cache) < CACHED_TEXTS:
            self._cache[text] = ids
        return ids


def ranks_of(spec: dict[str, Any]) -> dict[bytes, int]:
    """Rank, which is the id, by bytes of each token that merges make. tiktoken merges lower ranks first.

    Raises NotEquivalent if the model is not a plain byte-level BPE, or its merges are not in the order of ids.
    """
    model = spec["model"]
    if model["type"] != "BPE":
        raise NotEquivalent(f"its model is {model['type']}, not BPE")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(key):
            raise NotEquivalent(f"its model has {key}")
    vocabulary: dict[str, int] = model["vocab"]
    merges = _merges(spec)
    made = [vocabulary[left + right] for left, right in merges]
    if any(later < earlier for earlier, later in zip(made, made[1:], strict=False)):
        raise NotEquivalent("its merges are not in the order of the ids they make")
    alphabet = byte_alphabet()
    if missing := alphabet.keys() - vocabulary.keys():
        raise NotEquivalent(f"its vocabulary lacks {len(missing)} of the 256 bytes")
    ranked = alphabet.keys() | {left + right for left, right in merges}
    added = {token["content"] for token in spec["added_tokens"]}
    unmade = vocabulary.keys() - ranked - added
    if unmade and model.get("ignore_merges"):
        # With ignore_merges, a word that equals such a token is still found.
        raise NotEquivalent(
            f"no merge makes {counted(len(unmade), 'token')} of its vocabulary, such as {min(unmade)!r}"
        )
    try:
        return {bytes(alphabet[letter] for letter in token): vocabulary[token] for token in ranked}
    except KeyError as error:
        raise NotEquivalent(f"its vocabulary has a token with {error}, which represents no byte") from None


def check_merges(spec: dict[str, Any], tokenizer: Tokenizer) -> None:
    """Check that tiktoken merges as the merge list says; tiktoken merges any two tokens that together are a token.

    Both agree on a token whose own bytes merge into it: its last two parts are then the same in every text. Other
    tokens occur only as complete words with ignore_merges; for these, every split in two must be in the merge list.
    Raises NotEquivalent, naming a token on which they could differ.
    """
    bpe = tokenizer.model
    ignores_merges, bpe.ignore_merges = bpe.ignore_merges, False
    vocabulary = spec["model"]["vocab"]
    merges = set(_merges(spec))
    try:
        for token in {left + right for left, right in merges}:
            if len(bpe.tokenize(token)) == 1:
                continue
            splits = ((token[:place], token[place:]) for place in range(1, len(token)))
            splits = (split for split in splits if split[0] in vocabulary and split[1] in vocabulary)
            if not ignores_merges or any(split not in merges for split in splits):
                raise NotEquivalent(f"its merges do not make its token {token!r} of that token's own bytes")
    finally:
        bpe.ignore_merges = ignores_merges


def byte_alphabet() -> dict[str, int]:
    """Byte by its character in a byte-level vocabulary. Printable bytes are their own characters."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


def _merges(spec: dict[str, Any]) -> list[tuple[str, str]]:
    """The merges in order. Older files have each as one text."""
    pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in spec["model"]["merges"])
    return [(left, right) for left, right in pairs]


def _normalizer(normalizer: dict[str, Any] | None) -> Callable[[str], str] | None:
    """The function that normalizes text, None for none."""
    if normalizer is None or normalizer == {"type": "Sequence", "normalizers": []}:
        return None
    if normalizer == {"type": "NFC"}:
        return lambda text: unicodedata.normalize("NFC", text)
    raise NotEquivalent(f"its normalizer is {_kind(normalizer)}")


def _pattern(pre_tokenizer: dict[str, Any] | None) -> str:
    """The regular expression that splits text into words."""
    if pre_tokenizer is None:
        raise NotEquivalent("it has no pre-tokenizer")
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    last = steps[-1] if steps else {"type": "nothing"}
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        raise NotEquivalent(f"its pre-tokenizer {_kind(pre_tokenizer)} is not ByteLevel without a space in front")
    if len(steps) == 1 and last.get("use_regex", True):
        return GPT2_PATTERN
    split = steps[0]
    if len(steps) != 2 or last.get("use_regex", True) or split["type"] != "Split":
        raise NotEquivalent(f"its pre-tokenizer {_kind(pre_tokenizer)} splits text in more than one step")
    if split["behavior"] != "Isolated" or split["invert"] or "Regex" not in split["pattern"]:
        raise NotEquivalent("its pre-tokenizer's Split does not isolate the matches of a regular expression")
    return str(split["pattern"]["Regex"])


def _added_tokens(spec: dict[str, Any]) -> dict[str, bytes]:
    """Ids as int32 bytes of the tokens that are found before text is split."""
    tokens = spec["added_tokens"]
    for token in tokens:
        for flag in ("lstrip", "rstrip", "single_word"):
            if token[flag]:
                raise NotEquivalent(f"its token {token['content']!r} has {flag}")
    late = [token["content"] for token in tokens if token["normalized"]]
    if late and spec["normalizer"] is not None:
        raise NotEquivalent(f"its token {late[0]!r} is searched in normalized text")
    early = [token["content"] for token in tokens if not token["normalized"]]
    if clash := next(((one, two) for one in early for two in late if _may_overlap(one, two)), None):
        raise NotEquivalent(f"its tokens {clash[0]!r} and {clash[1]!r} may overlap in a text")
    return {token["content"]: np.int32(token["id"]).tobytes() for token in tokens if token["content"]}


def _may_overlap(one: str, two: str) -> bool:
    """Whether some text has both with a common character."""
    ends = any(one.endswith(two[:size]) or two.endswith(one[:size]) for size in range(1, min(len(one), len(two)) + 1))
    return ends or one in two or two in one


def _kind(part: dict[str, Any]) -> str:
    """The type of a part of a tokenizer, with the types of its own parts."""
    inner: Iterable[dict[str, Any]] = part.get("normalizers") or part.get("pretokenizers") or ()
    names = "+".join(_kind(one) for one in inner)
    return f"{part['type']}({names})" if names else str(part["type"])
