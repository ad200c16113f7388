"""Match the patterns of an adapter against names of layers, in a bounded number of steps.

Python's `re` tries one way after the other, and `([a-z]+.?)+!` has more ways than there is time. Here all ways are
followed at once: the places that are reached in a name are the bits of a number, and each part of the pattern maps
places to places. The answer is that of `re.fullmatch`.
"""

import re
from collections.abc import Iterable
from re import _constants as sre  # type: ignore[attr-defined]  # Python's own parser of patterns.
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

MOST_STEPS = 2_000_000
"""Of all patterns of an adapter against all layers: some three seconds. Unsloth's pattern takes 60 for a layer."""
LITERAL = re.compile(r"\^?[\w.-]+")
"""A key of `rank_pattern` that is a name."""
CATEGORIES = {
    sre.CATEGORY_DIGIT: str.isdecimal,
    sre.CATEGORY_SPACE: str.isspace,
    sre.CATEGORY_WORD: lambda one: one.isalnum() or one == "_",
    sre.CATEGORY_NOT_DIGIT: lambda one: not one.isdecimal(),
    sre.CATEGORY_NOT_SPACE: lambda one: not one.isspace(),
    sre.CATEGORY_NOT_WORD: lambda one: not (one.isalnum() or one == "_"),
}


class PatternFault(ValueError):
    """A pattern is wrong, or takes too many steps. The message completes a sentence that begins with its key."""


class Steps:
    """Counts the steps of all patterns of an adapter."""

    def __init__(self) -> None:
        self._left = MOST_STEPS

    def count(self, number: int = 1) -> None:
        """Count steps. Raises PatternFault if there are too many."""
        self._left -= number
        if self._left < 0:
            raise PatternFault("takes too many steps to match; write the names of the layers")


class NamePattern:
    """A pattern for complete names."""

    def __init__(self, pattern: str, steps: Steps):
        """Read a pattern.

        Raises PatternFault if it is none, or goes back to what it matched before.
        """
        steps.count(20 * len(pattern))  # Of Python's parser.
        try:
            self._parts = parser.parse(pattern)
        except (re.error, RecursionError, OverflowError, ValueError) as error:
            raise PatternFault(f"is no pattern ({error})") from None
        if self._parts.state.flags != re.UNICODE:
            raise PatternFault("has flags, which no layer's name needs; leave them out")
        self._steps = steps

    def matches(self, name: str) -> bool:
        """Whether the pattern matches a complete name. Raises PatternFault after too many steps."""
        try:
            return bool(_Places(name, self._steps).after(self._parts, 1) >> len(name))
        except RecursionError:
            raise PatternFault("is nested too deeply") from None


class _Places:
    """Sets of places in a name; bit k of a number is the place before character k."""

    def __init__(self, name: str, steps: Steps):
        self._name, self._steps = name, steps
        self._end = 1 << len(name)
        self._before = {character: _bits(one == character for one in name) for character in {*name}}
        """The places before each character."""
        words = [CATEGORIES[sre.CATEGORY_WORD](one) for one in name]
        ends = _bits(before != after for before, after in zip([False, *words], [*words, False], strict=True))
        self._at = {
            **dict.fromkeys((sre.AT_BEGINNING, sre.AT_BEGINNING_STRING), 1),
            **dict.fromkeys((sre.AT_END, sre.AT_END_STRING), self._end),
            sre.AT_BOUNDARY: ends,
            sre.AT_NON_BOUNDARY: ~ends,
        }

    def after(self, parts: Any, places: int) -> int:
        """The places after parts of a pattern that begin at some of these places."""
        for kind, value in parts:
            if not places:
                break
            places = self._after_one(kind, value, places)
        return places

    def _after_one(self, kind: Any, value: Any, places: int) -> int:
        self._steps.count()
        if (characters := self._characters(kind, value)) is not None:
            return (places & characters) << 1
        if kind is sre.BRANCH:
            found = 0
            for branch in value[1]:
                found |= self.after(branch, places)
            return found
        if kind is sre.SUBPATTERN and not (value[1] or value[2]):
            return self.after(value[3], places)
        if kind in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            return self._repeated(value[0], value[1], value[2], places)
        if kind is sre.AT:
            return places & self._at[value]
        if kind in (sre.ASSERT, sre.ASSERT_NOT) and value[0] > 0:
            singles = (1 << k for k in range(len(self._name) + 1) if places >> k & 1)
            return sum(one for one in singles if bool(self.after(value[1], one)) is (kind is sre.ASSERT))
        raise PatternFault(f"has a part of a kind that is not matched here ({kind}); write the names of the layers")

    def _repeated(self, least: int, most: int, parts: Any, places: int) -> int:
        """The places after `least` to `most` repetitions."""
        # More repetitions than characters are empty ones, which change nothing.
        least, most = min(least, len(self._name) + 1), min(most, len(self._name) + 1)
        if least <= 1 and most > len(self._name) and len(parts) == 1:
            if (characters := self._characters(*parts[0])) is not None:
                self._steps.count()
                if least:
                    places = (places & characters) << 1
                # The sum carries a place to the end of the characters that follow it.
                return places | (characters + (places & characters)) ^ characters
        for _ in range(least):
            places = self.after(parts, places)
        found = places
        for _ in range(most - least):
            places = self.after(parts, places) & ~found
            if not places:
                break
            found |= places
        return found

    def _characters(self, kind: Any, value: Any) -> int | None:
        """The places before characters that a part for one character matches; None for other parts."""
        if kind is sre.LITERAL:
            return self._before.get(chr(value), 0)
        if kind is sre.NOT_LITERAL:
            return (self._end - 1) & ~self._before.get(chr(value), 0)
        if kind is sre.ANY:
            return (self._end - 1) & ~self._before.get("\n", 0)
        if kind is sre.IN:
            self._steps.count(len(value))
            return sum(places for character, places in self._before.items() if _is_in(character, value))
        return None


def _bits(each: Iterable[bool]) -> int:
    return sum(1 << k for k, one in enumerate(each) if one)


def _is_in(character: str, items: Any) -> bool:
    """Whether a character is in a class such as `[a-z]`."""
    negated = items[0][0] is sre.NEGATE
    return negated is not any(_is_item(character, *item) for item in items[negated:])


def _is_item(character: str, kind: Any, value: Any) -> bool:
    if kind is sre.LITERAL:
        return ord(character) == value
    if kind is sre.RANGE:
        return bool(value[0] <= ord(character) <= value[1])
    return bool(CATEGORIES[value](character))
