"""Names of layers in a regular expression, as `lora_target_modules` of Axolotl has them."""

import math
import re
from collections.abc import Iterator
from itertools import product

MOST_CHARACTERS = 4096
MOST_NAMES = 4096
"""Names that a regular expression may stand for."""
TOWER = re.compile(r"(^|[._])(visual|vision\w*)([._]|$)")
PROJECTOR = re.compile(r"(^|[._])(\w*merger|\w*projector|connector|vision_adapter)([._]|$)")
TOKEN = re.compile(r"\(\?:|\\d[+*]?|\[(?:\\d|0-9)\][+*]?|\[\w{1,20}\]|\.[+*]|\\.|.", re.DOTALL)


def is_pattern(value: str) -> bool:
    """Whether lora_target_modules is a regular expression, not names."""
    return bool(set(value) & set("()[]\\*+|"))


def names_of(pattern: str) -> list[str]:
    """The names that a regular expression of groups, alternatives and numbers stands for.

    Raises:
        ValueError: it has another form, or stands for too many names.
    """
    if len(pattern) > MOST_CHARACTERS:
        raise ValueError(f"must have at most {MOST_CHARACTERS} characters")
    tokens = TOKEN.findall(pattern)
    try:
        names, rest = _alternatives(tokens, 0)
    except RecursionError:
        raise ValueError("must have fewer groups in one another") from None
    if rest != len(tokens) or not names:
        raise ValueError("must be a regular expression of names, groups and alternatives")
    return names


def _alternatives(tokens: list[str], place: int) -> tuple[list[str], int]:
    """The texts of alternatives, up to the end of a group."""
    found: list[str] = []
    parts: list[list[str]] = []
    while place < len(tokens) and tokens[place] != ")":
        token = tokens[place]
        place += 1
        if token == "|":
            found += _joined(parts)
            parts = []
            if len(found) > MOST_NAMES:
                raise ValueError(f"must stand for at most {MOST_NAMES} names")
            continue
        texts = [token]
        if token in ("(", "(?:"):
            texts, place = _alternatives(tokens, place)
            if place == len(tokens):
                raise ValueError("must close its groups")
            place += 1
        elif token.startswith(("\\d", "[\\d", "[0-9")):
            texts = ["0"]
        elif len(token) > 1 and token.startswith("["):
            texts = list(token[1:-1])
        elif token in (".*", ".+"):
            texts = ["*"]
        elif token.startswith("\\"):
            texts = [token[1]]
        elif token in "[]{}+*^$?":
            raise ValueError("must be a regular expression of names, groups and alternatives")
        if place < len(tokens) and tokens[place] == "?":
            texts, place = [*texts, ""], place + 1
        parts.append(texts)
    return found + _joined(parts), place


def _joined(parts: list[list[str]]) -> list[str]:
    if math.prod(map(len, parts)) > MOST_NAMES:
        raise ValueError(f"must stand for at most {MOST_NAMES} names")
    return ["".join(texts) for texts in product(*parts)]


def adapted_parts(names: list[str]) -> Iterator[str]:
    """Parts for images among layers with adapters, by their full names."""
    for part, known in (("projector", PROJECTOR), ("vision", TOWER)):
        if any(known.search(name) and not (part == "vision" and PROJECTOR.search(name)) for name in names):
            yield part
