"""Pieces of Markdown."""

from collections.abc import Iterable, Sequence
from typing import Any

from lean_finetune.core.units import readable_size

NONE = "–"
"""Stands where a value does not exist."""


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; every column but the first is right-aligned."""
    lines = [header, ("---", *("---:" for _ in header[1:])), *rows]
    return "\n".join(f"| {' | '.join(cell(value) for value in line)} |" for line in lines)


def cell(value: Any) -> str:
    """A value as it may stand in a table."""
    return " ".join(str(value).split()).replace("|", "\\|")


def size(count: int | None) -> str:
    """Bytes for reading, where they are known."""
    return NONE if count is None else readable_size(count)
