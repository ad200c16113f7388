"""Pins as people read them."""

from collections.abc import Mapping
from typing import Any

MOST_SHOWN = 8
"""Sources told by name; the lock holds them all."""


def describe_model(lock: Mapping[str, Any]) -> str:
    """The model of locks/model.json and, where it has one, its commit."""
    return _shown(lock["name"], lock["revision"])


def describe_data(lock: Mapping[str, Any]) -> str:
    """The sources of locks/data.json, each with its commit where it has one."""
    sources = [
        _shown(one["source"], one["revision"]) + (" (held out)" if is_heldout_source(one) else "")
        for one in lock["sources"]
    ]
    more = len(sources) - MOST_SHOWN
    return ", ".join(sources[:MOST_SHOWN]) + (f" and {more} more" if more > 0 else "")


def is_heldout_source(source: Mapping[str, Any]) -> bool:
    """Whether a source of locks/data.json is that of data.heldout_source, whose rows are never trained."""
    return bool(source.get("heldout"))


def _shown(name: str, revision: str | None) -> str:
    """A name and its commit."""
    return f"{name} at {revision}" if revision else name
