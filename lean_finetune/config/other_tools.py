"""The names that other tools give to parameters, from the tables in lean_finetune/other_tools.

The tables are read, never imported or pinned: they decide no result of a stage.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from lean_finetune.core.read_yaml import read_yaml

TABLES = Path(__file__).parents[1] / "other_tools"
SHARED = "shared.yaml"
Table = Mapping[str, Any]


def _read_table(path: Path) -> Any:
    return read_yaml(path, "file is missing; install lean-finetune again")


@cache
def shared() -> Table:
    """What the tables share: facts, and tables of values."""
    return dict(_read_table(TABLES / SHARED))


@cache
def tables() -> tuple[Table, ...]:
    """One table for each tool."""
    return tuple(_read_table(path) for path in sorted(TABLES.glob("*.yaml")) if path.name != SHARED)


def our_names(key: str) -> list[str]:
    """Our parameters for the name that other tools give to one; empty if no tool has it."""
    found = []
    for table in tables():
        for name, rule in table["keys"].items():
            fact = "adapted_layers" if "adapts" in rule else None if isinstance(rule, str) else rule.get("fact")
            ours = rule if isinstance(rule, str) else rule.get("to") or shared()["facts"].get(fact)
            last = name.rpartition(".")[2]
            if ours and (key == name or (key == last != "name")) and ours not in found:
                found.append(ours)
    return found


def why_ignored(key: str) -> str | None:
    """Why a key of another tool has no parameter here; None if no tool has it."""
    for table in tables():
        for reason, keys in table["ignored"].items():
            if key in keys:
                return str(reason)
        rule = table["keys"].get(key)
        if isinstance(rule, Mapping) and "differs" in rule:
            return str(rule["differs"])
    return None
