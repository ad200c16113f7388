"""The part of a JSON value that is equal in two equal runs."""

import re
from typing import Any

from lean_finetune.core.atomic_files import SEAL

OF_THE_PROCESS = re.compile(r"(^|_)(seconds|per_second|rss|host|live|reserved|unused|growth)(_|$)")
"""Metrics and columns that differ between equal runs: times, speeds, and the process's memory. Tensor memory
(`allocated`, `measured`) is equal."""


def repeatable(value: Any, *, inside: bool = False) -> Any:
    """A JSON value without those entries, at any depth, and without hashes of content that has some."""
    if isinstance(value, dict):
        if not inside:
            value = {name: item for name, item in value.items() if name not in (SEAL, "curves.csv")}
        return {name: repeatable(item, inside=True) for name, item in value.items() if not OF_THE_PROCESS.search(name)}
    return [repeatable(item, inside=True) for item in value] if isinstance(value, list) else value
