"""A bounded stretch of rows, cut from the source in one process and turned into tokens in another."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Whole rows of one file, still as bytes. The cut depends on the source's bytes alone."""

    number: int
    """Place in the whole stream, from 0."""
    source: int
    """Place of its source in the data lock."""
    file: int
    """Place of its file among all files of the data lock."""
    kind: Literal["lines", "values", "text", "arrow"]
    """lines: JSON Lines | values: JSON values of an array | text: plain lines | arrow: a record batch."""
    payload: bytes
    first_row: int
    """Number of its first row in the file, from 0; lines and text number their lines, empty ones too."""
    ends: tuple[int, ...] = ()
    """values: end of each value in the payload."""
    lines: tuple[int, ...] = ()
    """values, arrow of a CSV: line of each row's first character, from 1."""
    faults: tuple[tuple[int, int, str], ...] = ()
    """(number, line, fault) of rows that are not in the payload: too long, or with too many cells. Ascending."""


class RawRow(NamedTuple):
    """One row of a block."""

    number: int
    """In its file, from 0."""
    line: int
    """For people, from 1: the line in the file, or the row's place where the format has no lines."""
    value: dict[str, Any] | None
    """None when it has a fault."""
    fault: str | None
    """What is wrong with it and what mends it."""
