"""Texts on which two engines of a tokenizer are compared: edge cases and every kind of character."""

import random
import unicodedata
from collections.abc import Sequence
from itertools import groupby

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
