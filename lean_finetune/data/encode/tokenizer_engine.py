"""The two engines that encode text, tokenizers and tiktoken, and the choice between them by probes."""

import random
import re
import unicodedata
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import orjson
from tokenizers import Tokenizer

from cuda_memory.units import counted
from lean_finetune.core.errors import UserError
from lean_finetune.data.chat.control_tokens import TRAINED_START, any_of
from lean_finetune.pinning.config_file import reason_of

TOKENIZER_FILE = "tokenizer.json"
TEXTS_PER_CALL = 512
# An encoding takes over a hundred bytes for each token, so long texts are encoded in small batches.
CHARACTERS_PER_CALL = 1 << 20


class EncodedTexts(NamedTuple):
    """Texts as token ids."""

    values: np.ndarray
    """int32: the ids of all texts, concatenated."""
    lengths: np.ndarray
    """int64, shape (texts,): tokens of each text."""
    failed: list[int]
    """Indices of texts that the engine could not encode, so that the tokenizers library did."""


class Engine(Protocol):
    """Encodes texts, in one thread: control tokens in them become their ids, and nothing is added."""

    tokenizer: Tokenizer

    def encode(self, texts: Sequence[str]) -> EncodedTexts:
        """Ids of each text."""


class TokenizersEngine:
    """Encodes with the tokenizers library, with its own threads."""

    def __init__(self, tokenizer: Tokenizer):
        """Encode with this tokenizer."""
        self.tokenizer = tokenizer

    def encode(self, texts: Sequence[str]) -> EncodedTexts:
        """Ids of each text."""
        values = array("i")
        lengths = array("q")
        for batch in _batches(texts):
            for encoding in self.tokenizer.encode_batch_fast(batch, add_special_tokens=False):
                ids = encoding.ids
                values.fromlist(ids)
                lengths.append(len(ids))
        return EncodedTexts(np.frombuffer(values, np.int32), np.frombuffer(lengths, np.int64), [])


def read_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of a model directory, without the truncation and padding saved in it.

    Raises UserError if its file is damaged.
    """
    try:
        tokenizer = Tokenizer.from_file(str(directory / TOKENIZER_FILE))
    except Exception as error:  # tokenizers raises a plain Exception.
        raise UserError(
            f"model.name: {directory / TOKENIZER_FILE} is not a tokenizer "
            f"({reason_of(directory / TOKENIZER_FILE, error)}); save or download it again"
        ) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _batches(texts: Sequence[str]) -> Iterator[list[str]]:
    """The texts in batches of bounded size."""
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if len(batch) == TEXTS_PER_CALL or characters >= CHARACTERS_PER_CALL:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


# Texts on which two engines of a tokenizer are compared: edge cases and every kind of character.

CHARACTERS_PER_TEXT = 64
RANDOM_TEXTS = 200
RANDOM_CHARACTERS = 40
SEED = 5
SCRIPTS = (
    *((0x20, 0x7F), (0x20, 0x7F), (0xA0, 0x250), (0x300, 0x530), (0x590, 0xE80), (0x1E00, 0x2C00)),
    *((0x3000, 0x3100), (0x4E00, 0x9FFF), (0xAC00, 0xD7A0), (0xF900, 0xFFF0), (0x1F000, 0x1FB00)),
)
"""Half-open ranges of characters. ASCII is listed twice, so it is drawn more often."""

ASSIGNED = (
    *(range(0x40000), range(0xDFFFE, 0xE0200), range(0xEFFFE, 0xF0002)),
    *(range(0xFFFFD, 0x100002), range(0x10FFFD, 0x110000)),
)
"""Ranges in which categories of characters change. The planes between them have one category each."""

EDGE_CASES = (
    "",
    " ",
    "  ",
    "a  b   c    d",
    " \n \n\n  \t\t x\t",
    "trailing   ",
    "\r\n\r\nline\r\n  indented\r",
    "\u00a0\u2003\u3000\u200b\ufeffx\u0085\u2028\u2029y\x1c\x1f z",
    "I'm you're HE'LL they'd we've it's 'S 'Re o'clock ''s ’s ſ's 'ſ K'K",
    "1 12 123 1234 12345678901234567890 3.14 1,000,000 ½ Ⅷ ٣٤٥ १२३ 一二三 x2 2x",
    "你好，世界。日本語のテキスト、カタカナ。한국어 텍스트 각 한",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪🇫🇷 ☺️ 1️⃣ \U0001fae8",
    "e\u0301 é a\u0308\u0323 ạ̈ Å Å \u0301x ﬁ ﷺ ὠ\u0345 क्षि ก็ \u1100\u1161\u11a8",
    "שָׁלוֹם مرحبا بالعالم \u202etxet\u202c \u0640\u0640",
    'def f(x: int) -> str:\n    return f"{x!r}"  # comment\n\n\n\tif a<=b&&c!=d||!e{f[0]=~g;}\n',
    '<div class="a">&nbsp;</div> [INST] <s> </s> <unk> <|im_start|> {{x}} {% y %} $\\frac{a}{b}$',
    "http://example.org/a?b=c&d=%20#e user@example.org C:\\dir\\file.txt --flag=1 #!/bin/sh",
    "\x00 \x00\x01\x7f\x80\x9f\xad",
    "\ue000\uf8ff\U000f0000\U0010fffd \ufffd\ufffe\uffff \U0001fffe",
    "ΑΒΓ αβγς Привет İiIı ǅ ß ẞ ŉ Straße ŁÓDŹ",
    "aÀ1一 b한2ก cا3א",
    "mixed中文English日本123한국어 and中 文 . 。",
    "!!!??? ... --- === *** /// \\\\\\ ~~~ ''' \"\"\" ``` ¡¿ —–‘’“” … ‥",
    "x" * 300,
    " " * 300 + "x" + "\n" * 100 + "-" * 200 + "9" * 100 + "字" * 100,
    "ab" * 2000,
)


def probe_texts(added_tokens: Sequence[str]) -> list[str]:
    """Edge cases, every kind of character, all bytes, the tokens added to the vocabulary, and random texts."""
    every_byte = bytes(range(256)).decode("latin-1")
    kinds = "".join(f"a{one}1{one}A {one}! {one}\n" for one in _characters_of_every_kind())
    step = CHARACTERS_PER_TEXT * len("a_1_A _! _\n")
    texts = [*EDGE_CASES, every_byte, " ".join(every_byte)]
    texts += [unicodedata.normalize(form, text) for form in ("NFC", "NFD") for text in EDGE_CASES]
    texts += [kinds[start : start + step] for start in range(0, len(kinds), step)]
    for token in added_tokens:
        texts += [token, f"a{token}b", f" {token} {token}{token}\n{token}"]
    return texts + _random_texts()


def _characters_of_every_kind() -> list[str]:
    """The first and the last character of each run of characters of one category; no surrogates.

    Regular expressions split text by category, and two libraries may use different versions of Unicode.
    """
    characters = [chr(code) for some in ASSIGNED for code in some if not 0xD800 <= code <= 0xDFFF]
    runs = (list(run) for _, run in groupby(characters, key=unicodedata.category))
    # Not a set, whose order differs between runs.
    return [one for run in runs for one in dict.fromkeys((run[0], run[-1]))]


def _random_texts() -> list[str]:
    """Texts of random characters from different scripts, the same in every run."""
    source = random.Random(SEED)

    def text() -> str:
        chosen = [source.choice(SCRIPTS) for _ in range(RANDOM_CHARACTERS)]
        return "".join(source.choice((" ", "", "", "")) + chr(source.randrange(*one)) for one in chosen)

    return [text() for _ in range(RANDOM_TEXTS)]


# Choice of the engine that turns text into ids: tiktoken where it gives the same ids as tokenizers.

SHOWN_CHARACTERS = 40


@dataclass(frozen=True, kw_only=True)
class EngineChoice:
    """The chosen engine, and the reason."""

    name: str
    """`tokenizers` or `tiktoken`."""
    reason: str
    engine: Engine


def load_engine(name: str, directory: Path) -> Engine:
    """The engine `tokenizers` or `tiktoken` of a model directory.

    Raises NotEquivalent if tiktoken would give other ids.
    """
    plain = TokenizersEngine(read_tokenizer(directory))
    return plain if name == "tokenizers" else TiktokenEngine(_read_spec(directory), plain)


def choose_engine(requested: str, directory: Path, sample_texts: Sequence[str]) -> EngineChoice:
    """Choose tiktoken only where it gives the same ids as the tokenizers library.

    Both encode edge cases, every kind of character, and the sample of the data. No thread is started, so worker
    processes can be forked afterwards. Raises UserError if `requested` is tiktoken, and its ids differ.
    """
    plain = load_engine("tokenizers", directory)
    if requested == "tokenizers":
        return EngineChoice(name=requested, reason="run.tokenizer_engine says so", engine=plain)
    try:
        spec = _read_spec(directory)
        engine = TiktokenEngine(spec, plain)
        check_merges(spec, plain.tokenizer)
        compared = _compare(engine, plain.tokenizer, sample_texts)
    except NotEquivalent as fault:
        if requested == "tiktoken":
            raise UserError(
                f"run.tokenizer_engine: tiktoken cannot replace the tokenizer in {directory}: {fault}; "
                "set auto or tokenizers"
            ) from None
        return EngineChoice(name="tokenizers", reason=f"tiktoken cannot replace it: {fault}", engine=plain)
    reason = f"it gave the ids of the tokenizers library on {compared} texts"
    return EngineChoice(name="tiktoken", reason=reason, engine=engine)


def _read_spec(directory: Path) -> dict[str, Any]:
    """The content of tokenizer.json."""
    return dict(orjson.loads((directory / TOKENIZER_FILE).read_bytes()))


def _compare(engine: Engine, tokenizer: Tokenizer, sample_texts: Sequence[str]) -> int:
    """The number of texts compared."""
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    # No encoder accepts lone surrogates; Guard replaces them before rows are encoded.
    texts = [*probe_texts(added), *(text.encode(errors="replace").decode() for text in sample_texts)]
    for text in texts:
        # One by one: a batch would start threads.
        expected = tokenizer.encode(text, add_special_tokens=False).ids
        if engine.encode([text]).values.tolist() != expected:
            shown = text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
            raise NotEquivalent(f"it gives other ids for {shown!r}")
    return len(texts)


# The engine that uses tiktoken for a byte-level BPE of tokenizer.json.
#
# tiktoken is several times as fast as tokenizers.
# Every part of tokenizer.json that affects ids is checked. A part that tiktoken lacks is refused.

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
