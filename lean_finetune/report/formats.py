"""How the report writes values."""

from collections.abc import Iterable

from cuda_memory.units import readable_size, readable_sizes

NONE = "–"
"""Shown for a value that does not exist."""


def size(count: int | None) -> str:
    """Format bytes; None becomes a dash."""
    return NONE if count is None else readable_size(count)


def sizes(counts: Iterable[int | None]) -> list[str]:
    """Format the bytes of a column, all in one unit; None becomes a dash."""
    return [text or NONE for text in readable_sizes(counts)]


def figure(value: float | None) -> str:
    """Format a number with four digits; None becomes a dash."""
    return NONE if value is None else f"{value:.4g}"


def percent(share: float | None) -> str:
    """Format a share; None becomes a dash."""
    return NONE if share is None else f"{100 * share:.1f} %"
