"""tiktoken's engine on the vocabulary, merges and cut of a tokenizer.json: byte-level BPE, several times as fast.

What decides the ids is compared piece by piece, and a tokenizer with anything that tiktoken has no like for is refused.
"""

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from lean_finetune.data.chat.control_tokens import TRAINED_START, any_of
from lean_finetune.data.encode.encoder import Encoded, Engine

# The cut of ByteLevel with use_regex, the one of GPT-2.
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Headers of turns and the like come again and again; longer text hardly does.
KNOWN_CHARACTERS = 24
KNOWN_PIECES = 1 << 13
BYTES_PER_ID = 4
NONE_ALLOWED: frozenset[str] = frozenset()


class NotExact(Exception):
    """Why tiktoken cannot stand for a tokenizer."""


class TiktokenEngine:
    """Encodes with tiktoken, and with the tokenizers library the texts on which tiktoken gives up."""

    def __init__(self, spec: dict[str, Any], fallback: Engine):
        """Build the engine from the content of tokenizer.json.

        Raises:
            NotExact: the tokenizer has a part for which tiktoken has no like.
        """
        import tiktoken

        self._fallback = fallback
        self._normalize = _normalizer(spec["normalizer"])
        self._known = _added_tokens(spec)
        """Ids, as int32 bytes, of added tokens, and of short pieces that were met."""
        ranks = ranks_of(spec)
        encoding = tiktoken.Encoding(
            "tokenizer.json",
            pat_str=_pattern(spec["pre_tokenizer"]),
            mergeable_ranks=ranks,
            # The guard keeps this character out of all text; without any token tiktoken would look for an empty one.
            special_tokens={TRAINED_START: max(*ranks.values(), *self._numbers(spec)) + 1},
        )
        self._encode = encoding._core_bpe.encode_to_tiktoken_buffer
        self._split: Callable[[str], list[str]] | None = None
        if self._known:
            self._split = re.compile(f"({any_of(self._known)})").split

    @staticmethod
    def _numbers(spec: dict[str, Any]) -> list[int]:
        return [token["id"] for token in spec["added_tokens"]] or [0]

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Ids of each text, control tokens as such, nothing added."""
        chunks: list[bytes] = []
        failed: list[int] = []
        for place, text in enumerate(texts):
            try:
                chunks.append(self._bytes(text))
            except ValueError:  # its regular expressions give up, as on a million spaces
                chunks.append(self._fallback.encode([text]).values.tobytes())
                failed.append(place)
        lengths = np.fromiter(map(len, chunks), np.int64, len(chunks)) // BYTES_PER_ID
        return Encoded(np.frombuffer(b"".join(chunks), np.int32), lengths, failed)

    def _bytes(self, text: str) -> bytes:
        """The ids of a text as int32."""
        known = self._known
        if len(text) <= KNOWN_CHARACTERS and text in known:
            return known[text]
        parts = [text] if self._split is None else self._split(text)
        return b"".join([known[part] if part in known else self._ordinary(part) for part in parts])

    def _ordinary(self, text: str) -> bytes:
        """The ids of text without added tokens."""
        normal = text if self._normalize is None or text.isascii() else self._normalize(text)
        ids = bytes(self._encode(normal, NONE_ALLOWED))
        if len(text) <= KNOWN_CHARACTERS and len(self._known) < KNOWN_PIECES:
            self._known[text] = ids
        return ids


def ranks_of(spec: dict[str, Any]) -> dict[bytes, int]:
    """Id by bytes of each token that merges make, as tiktoken takes it: the lower id is merged first.

    Raises:
        NotExact: the model is no plain byte-level BPE, or merges in another order than that of the ids.
    """
    model = spec["model"]
    if model["type"] != "BPE":
        raise NotExact(f"its model is {model['type']}, not BPE")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(key):
            raise NotExact(f"its model has {key}")
    vocabulary: dict[str, int] = model["vocab"]
    merges = _merges(spec)
    made = [vocabulary[left + right] for left, right in merges]
    if any(later < earlier for earlier, later in zip(made, made[1:], strict=False)):
        raise NotExact("its merges are not in the order of the ids they make")
    alphabet = byte_alphabet()
    if missing := alphabet.keys() - vocabulary.keys():
        raise NotExact(f"its vocabulary lacks {len(missing)} of the 256 bytes")
    kept = alphabet.keys() | {left + right for left, right in merges}
    added = {token["content"] for token in spec["added_tokens"]}
    unmade = vocabulary.keys() - kept - added
    if unmade and model.get("ignore_merges"):
        # A whole word that is such a token is found all the same.
        raise NotExact(f"no merge makes {len(unmade)} tokens of its vocabulary, such as {min(unmade)!r}")
    try:
        return {bytes(alphabet[letter] for letter in token): vocabulary[token] for token in kept}
    except KeyError as error:
        raise NotExact(f"its vocabulary has a token with {error}, which stands for no byte") from None


def check_merges(spec: dict[str, Any], tokenizer: Tokenizer) -> None:
    """See that tiktoken, which merges any two tokens whose bytes together are one, merges as the merges say.

    It does for a token whose bytes alone are merged into it: whatever stands beside them, its two last parts are then
    always the same. Other tokens come to be only where merges are ignored, as whole words; for these every way to cut
    them in two has to be a merge.

    Raises:
        NotExact: naming a token for which this does not hold.
    """
    bpe = tokenizer.model
    ignores_merges, bpe.ignore_merges = bpe.ignore_merges, False
    vocabulary = spec["model"]["vocab"]
    merges = set(_merges(spec))
    try:
        for token in {left + right for left, right in merges}:
            if len(bpe.tokenize(token)) == 1:
                continue
            cuts = ((token[:place], token[place:]) for place in range(1, len(token)))
            cuts = (cut for cut in cuts if cut[0] in vocabulary and cut[1] in vocabulary)
            if not ignores_merges or any(cut not in merges for cut in cuts):
                raise NotExact(f"its merges do not make its token {token!r} of that token's own bytes")
    finally:
        bpe.ignore_merges = ignores_merges


def byte_alphabet() -> dict[str, int]:
    """Byte by the character that stands for it in a byte-level vocabulary: printable bytes are themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


def _merges(spec: dict[str, Any]) -> list[tuple[str, str]]:
    """The merges in order; older files hold each as one text."""
    pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in spec["model"]["merges"])
    return [(left, right) for left, right in pairs]


def _normalizer(normalizer: dict[str, Any] | None) -> Callable[[str], str] | None:
    """What is done to text before it is cut."""
    if normalizer is None or normalizer == {"type": "Sequence", "normalizers": []}:
        return None
    if normalizer == {"type": "NFC"}:
        return lambda text: unicodedata.normalize("NFC", text)
    raise NotExact(f"its normalizer is {_kind(normalizer)}")


def _pattern(cut: dict[str, Any] | None) -> str:
    """The regular expression that cuts text into words."""
    if cut is None:
        raise NotExact("it has no pre-tokenizer")
    steps = cut["pretokenizers"] if cut["type"] == "Sequence" else [cut]
    last = steps[-1] if steps else {"type": "nothing"}
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        raise NotExact(f"its pre-tokenizer {_kind(cut)} is not ByteLevel without a space in front")
    if len(steps) == 1 and last.get("use_regex", True):
        return GPT2_PATTERN
    split = steps[0]
    if len(steps) != 2 or last.get("use_regex", True) or split["type"] != "Split":
        raise NotExact(f"its pre-tokenizer {_kind(cut)} cuts text in more than one step")
    if split["behavior"] != "Isolated" or split["invert"] or "Regex" not in split["pattern"]:
        raise NotExact("its pre-tokenizer's Split does not isolate the matches of a regular expression")
    return str(split["pattern"]["Regex"])


def _added_tokens(spec: dict[str, Any]) -> dict[str, bytes]:
    """Ids of the tokens that are found in text before it is cut, as int32 bytes."""
    tokens = spec["added_tokens"]
    for token in tokens:
        for flag in ("lstrip", "rstrip", "single_word"):
            if token[flag]:
                raise NotExact(f"its token {token['content']!r} has {flag}")
    late = [token["content"] for token in tokens if token["normalized"]]
    if late and spec["normalizer"] is not None:
        raise NotExact(f"its token {late[0]!r} is looked for in normalized text")
    early = [token["content"] for token in tokens if not token["normalized"]]
    if clash := next(((one, two) for one in early for two in late if _may_overlap(one, two)), None):
        raise NotExact(f"its tokens {clash[0]!r} and {clash[1]!r} may overlap in a text")
    return {token["content"]: np.int32(token["id"]).tobytes() for token in tokens if token["content"]}


def _may_overlap(one: str, two: str) -> bool:
    """Whether a text exists in which the two share a character."""
    ends = any(one.endswith(two[:size]) or two.endswith(one[:size]) for size in range(1, min(len(one), len(two)) + 1))
    return ends or one in two or two in one


def _kind(part: dict[str, Any]) -> str:
    """The name of a part of a tokenizer, with those of what it holds."""
    inner: Iterable[dict[str, Any]] = part.get("normalizers") or part.get("pretokenizers") or ()
    names = "+".join(_kind(one) for one in inner)
    return f"{part['type']}({names})" if names else str(part["type"])
