"""Format tables, cells and sizes as Markdown."""

from collections.abc import Iterable, Sequence
from typing import Any

from lean_finetune.core.units import readable_size

NONE = "–"
"""Shown for a value that does not exist."""


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a Markdown table; every column but the first is right-aligned."""
    lines = [header, ("---", *("---:" for _ in header[1:])), *rows]
    return "\n".join(f"| {' | '.join(cell(value) for value in line)} |" for line in lines)


def cell(value: Any) -> str:
    """Escape a value for a table cell."""
    return " ".join(str(value).split()).replace("|", "\\|")


def size(count: int | None) -> str:
    """Format bytes; None becomes a dash."""
    return NONE if count is None else readable_size(count)
