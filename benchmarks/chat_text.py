"""Generated English and Chinese with the statistics that affect a tokenizer's speed: word frequencies, marks, numbers.

Words follow a Zipf-Mandelbrot law: a few common ones make most of the text, and new ones keep appearing. English
words are built from syllables, Chinese words from the 3,755 common characters of GB 2312.
"""

from dataclasses import dataclass

import numpy as np

ONSETS = [
    "",
    "",
    "",
    *"b c d f g h j k l m n p r s t v w b c d f g h l m n p r s t w th st tr pl gr ch sh br qu".split(),
]
VOWELS = "a e i o u a e i o u ea ou".split()
CODAS = ["", "", "", "", *"n r s t l d m n r s t ng nt st ck".split()]
ENDINGS = ["", "", "", "", "", "", "s", "s", "ed", "ing", "er", "ly", "tion"]
ZIPF_SHIFT = 2.7
"""Mandelbrot's shift of the rank for natural text."""
ENGLISH_WORDS, CHINESE_WORDS = 60_000, 40_000
ENGLISH_EXPONENT, CHINESE_EXPONENT = 1.05, 0.95
LENGTH_DISORDER = 8.0
"""Characters by which a word may be ranked before shorter ones."""
NUMBER_SHARE = 0.025
CODE_NAMES = 400


@dataclass(frozen=True, kw_only=True)
class Mark:
    """What may follow a word."""

    text: str
    share: float
    ends_sentence: bool


ENGLISH_MARKS = (
    Mark(text=" ", share=0.868, ends_sentence=False),
    Mark(text=", ", share=0.055, ends_sentence=False),
    Mark(text=". ", share=0.045, ends_sentence=True),
    Mark(text=".\n\n", share=0.010, ends_sentence=True),
    Mark(text="? ", share=0.006, ends_sentence=True),
    Mark(text="'s ", share=0.006, ends_sentence=False),
    Mark(text=":\n- ", share=0.005, ends_sentence=True),
    Mark(text=" (e.g. ", share=0.003, ends_sentence=False),
    Mark(text=") 😀 ", share=0.002, ends_sentence=False),
)
CHINESE_MARKS = (
    Mark(text="", share=0.838, ends_sentence=False),
    Mark(text="，", share=0.090, ends_sentence=False),
    Mark(text="。", share=0.045, ends_sentence=True),
    Mark(text="。\n\n", share=0.008, ends_sentence=True),
    Mark(text="？", share=0.006, ends_sentence=True),
    Mark(text="、", share=0.008, ends_sentence=False),
    Mark(text="：\n1. ", share=0.005, ends_sentence=True),
)


@dataclass(frozen=True, kw_only=True)
class Language:
    """Words with their frequencies and the marks between them, as one table of strings."""

    strings: list[str]
    """Word with mark, at (capital × marks + mark) × words + word."""
    word_cdf: np.ndarray
    mark_cdf: np.ndarray
    ends_sentence: np.ndarray
    """Whether each mark does."""

    def write(self, rng: np.random.Generator, words: int) -> str:
        """A text of `words` words that begins a sentence."""
        word = np.searchsorted(self.word_cdf, rng.random(words))
        mark = np.searchsorted(self.mark_cdf, rng.random(words))
        capital = np.ones(words, np.int64)
        capital[1:] = self.ends_sentence[mark[:-1]]
        codes = (capital * len(self.mark_cdf) + mark) * len(self.word_cdf) + word
        return "".join(map(self.strings.__getitem__, codes.tolist())).strip()


def english(rng: np.random.Generator) -> Language:
    """Generate an English-like language."""
    drawn = 2 * ENGLISH_WORDS
    syllables = np.minimum(rng.geometric(0.4, drawn), 4).tolist()
    parts = [[_draw(rng, values, drawn) for values in (ONSETS, VOWELS, CODAS)] for _ in range(4)]
    endings = _draw(rng, ENDINGS, drawn)
    words = [
        "".join(kind[place] for syllable in parts[: syllables[place]] for kind in syllable) + endings[place]
        for place in range(drawn)
    ]
    return _language(rng, words, ENGLISH_WORDS, ENGLISH_EXPONENT, ENGLISH_MARKS)


def chinese(rng: np.random.Generator) -> Language:
    """Generate a Chinese-like language."""
    # Level 1 of GB 2312: rows 16 to 55, the last of them short by five.
    plane = [bytes((0xA0 + row, 0xA0 + cell)) for row in range(16, 56) for cell in range(1, 95)]
    characters = rng.permutation([code.decode("gb2312") for code in plane[:3755]])
    drawn = 2 * CHINESE_WORDS
    sizes = (1 + np.searchsorted((0.3, 0.85, 0.95), rng.random(drawn))).tolist()
    letters = characters[np.searchsorted(_zipf_cdf(len(characters), 0.9), rng.random((drawn, 4)))].tolist()
    words = ["".join(four[:size]) for four, size in zip(letters, sizes, strict=True)]
    return _language(rng, words, CHINESE_WORDS, CHINESE_EXPONENT, CHINESE_MARKS)


def code(rng: np.random.Generator, lines: int) -> str:
    """A fenced block of code-like lines: indents, brackets, names with underscores, numbers."""
    written = ["```python"]
    for _ in range(lines):
        one, two, number = (int(value) for value in rng.integers(0, CODE_NAMES, 3))
        indent = " " * (4 * (number % 4))
        written.append(
            (
                f"{indent}def compute_{one}(value_{two}: int, *, limit={number}) -> list[int]:",
                f"{indent}return [row * {number} for row in self.rows_{two} if row.item_{one} >= 0x{number:x}]",
                f"{indent}if not value_{two} or len(value_{two}) != {number}:",
                f"{indent}# keep_{one}: the {two}th of {number}",
                "",
            )[one % 5]
        )
    return "\n".join([*written, "```"])


def _language(
    rng: np.random.Generator, drawn: list[str], size: int, exponent: float, marks: tuple[Mark, ...]
) -> Language:
    """A language of `size` different words, of which the most common are short, as in natural text."""
    words = list(dict.fromkeys(drawn))[:size]
    disorder = rng.random(len(words)) * LENGTH_DISORDER
    ranked = [words[place] for place in np.argsort(np.array([len(one) for one in words]) + disorder, kind="stable")]
    # Numbers are spread evenly over the ranks, so that NUMBER_SHARE of the words are numbers.
    every = round(1 / NUMBER_SHARE)
    ranked[every - 1 :: every] = [str(int(10 ** (4 * rng.random()))) for _ in ranked[every - 1 :: every]]
    strings = [
        (one.capitalize() if capital else one) + mark.text
        for capital in (False, True)
        for mark in marks
        for one in ranked
    ]
    shares = np.array([mark.share for mark in marks])
    assert abs(shares.sum() - 1) < 1e-9
    mark_cdf = np.cumsum(shares)
    mark_cdf[-1] = 1.0
    return Language(
        strings=strings,
        word_cdf=_zipf_cdf(len(ranked), exponent),
        mark_cdf=mark_cdf,
        ends_sentence=np.array([mark.ends_sentence for mark in marks], np.int64),
    )


def _zipf_cdf(size: int, exponent: float) -> np.ndarray:
    """Cumulative frequency by rank."""
    weights = (np.arange(size) + 1 + ZIPF_SHIFT) ** -exponent
    cdf = np.cumsum(weights / weights.sum())
    cdf[-1] = 1.0
    return cdf


def _draw(rng: np.random.Generator, values: list[str], size: int) -> list[str]:
    """Draw `size` values uniformly."""
    return [values[place] for place in rng.integers(0, len(values), size).tolist()]
