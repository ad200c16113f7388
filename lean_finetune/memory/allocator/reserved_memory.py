"""The two kinds of allocator segments, and the metrics of what each of them reserves."""

from collections.abc import Mapping
from typing import Any

ALLOCATORS = {"native": False, "expandable": True}
"""The kinds of segments, and whether they expand (train.expandable_segments)."""


def segments_of(expandable: bool) -> str:
    """Return the kind of segments that a value of train.expandable_segments selects."""
    return next(name for name, expands in ALLOCATORS.items() if expands == expandable)


def kinds_by_suffix(expandable: bool) -> dict[str, str]:
    """Return the kind of segments by suffix of a metric's name; no suffix means the run's own kind."""
    return {"": segments_of(expandable), **{f"_{name}": name for name in ALLOCATORS}}


def tiers_metrics(tiers: Mapping[str, Any] | None, *, expandable: bool) -> dict[str, Any]:
    """Return the part of figures.json that tells reserved and process memory.

    Args:
        tiers: content of tiers.json; None for a CPU, which reserves nothing.
        expandable: train.expandable_segments.
    """
    metrics = {
        f"reserved_bytes_predicted{suffix}": None if tiers is None else tiers[kind]["reserved_bytes"]
        for suffix, kind in kinds_by_suffix(expandable).items()
    }
    process_bytes = None if tiers is None else tiers[segments_of(expandable)]["process_bytes"]
    return {**metrics, "process_bytes_predicted": process_bytes}
