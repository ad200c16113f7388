"""Make text of others safe to show: in a terminal, in Markdown, in HTML."""

import re
import unicodedata

KEPT = "\n\t"
NOT_SHOWN = ("Cc", "Cs", "Zl", "Zp")
"""Categories that are replaced: control characters, which a terminal obeys, surrogates, other line ends."""
REORDERING = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Bidirectional controls: they can show text in another order than it has."""
MARKUP = re.compile(r"[\\`<>\[\]|&]")
"""Characters with which Markdown begins images, links, HTML, entities, code and cells."""


def visible(text: str) -> str:
    """Return a text with the code of each character that a terminal or a browser obeys but does not show."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_visible, text))


def markdown_text(text: str) -> str:
    """Return a text as one line of Markdown that shows it: no images, links, HTML or cells."""
    return MARKUP.sub(r"\\\g<0>", visible(" ".join(text.split())))


def _visible(character: str) -> str:
    hidden = character in REORDERING or (character not in KEPT and unicodedata.category(character) in NOT_SHOWN)
    return ascii(character)[1:-1] if hidden else character
