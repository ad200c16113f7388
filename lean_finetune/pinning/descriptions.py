"""Short descriptions of the pinned model and data for reports and model cards."""

from collections.abc import Mapping
from typing import Any

MAX_SOURCES = 8
"""Sources that a description names; the lock has all of them."""


def describe_model(lock: Mapping[str, Any]) -> str:
    """The model of locks/model.json, with its commit if it has one."""
    return _with_commit(lock["name"], lock["revision"])


def describe_data(lock: Mapping[str, Any]) -> str:
    """The sources of locks/data.json, each with its commit if it has one."""
    sources = [
        _with_commit(one["source"], one["revision"]) + (" (held out)" if is_heldout_source(one) else "")
        for one in lock["sources"]
    ]
    more = len(sources) - MAX_SOURCES
    return ", ".join(sources[:MAX_SOURCES]) + (f" and {more} more" if more > 0 else "")


def is_heldout_source(source: Mapping[str, Any]) -> bool:
    """Whether a source of locks/data.json is from data.heldout_source, whose rows are never trained."""
    return bool(source.get("heldout"))


def _with_commit(name: str, revision: str | None) -> str:
    return f"{name} at {revision}" if revision else name
