"""The names that other tools give to parameters, from the tables in lean_finetune/other_tools.

The tables are read, never imported or pinned: they decide no result of a stage.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from lean_finetune.core.read_yaml import read_yaml
from lean_finetune.islands.objectives.registry import OBJECTIVES

TABLES = Path(__file__).parents[1] / "other_tools"
SHARED, OF_OBJECTIVES = "shared.yaml", "objectives.yaml"
Table = Mapping[str, Any]


def _read_table(path: Path) -> Any:
    return read_yaml(path, "file is missing; install lean-finetune again")


@cache
def shared() -> Table:
    """What the tables share: facts, and tables of values."""
    return dict(_read_table(TABLES / SHARED))


@cache
def of_objectives() -> Mapping[str, Table]:
    """By objective of preferences, what each tool calls it, its parameters and its rows."""
    return dict(_read_table(TABLES / OF_OBJECTIVES))


@cache
def tables() -> tuple[Table, ...]:
    """One table for each tool."""
    paths = [path for path in sorted(TABLES.glob("*.yaml")) if path.name not in (SHARED, OF_OBJECTIVES)]
    return tuple(_with_objectives(_read_table(path), path.stem) for path in paths)


def _with_objectives(table: Table, tool: str) -> Table:
    """The table of a tool with its names of objectives, of their parameters and of their rows."""
    keys, own = dict(table["keys"]), {}
    by_kind = {name: dict(table[name]) for name in ("row_types", "user_types") if name in table}
    for objective, tools in of_objectives().items():
        own[objective] = found = tools.get(tool, {})
        for key, value in found.get("names", {}).items():
            keys[key] = {**keys[key], "values": {**keys[key]["values"], value: objective}}
        keys |= found.get("keys", {})
        for name in by_kind.keys() & found.keys():
            by_kind[name][OBJECTIVES[objective].kind.name] = found[name]
    only = {name: one["only_keys"] for name, one in reversed(own.items()) if "only_keys" in one}
    return {**table, **by_kind, "keys": keys, "objectives": own, "objective_of_keys": only}


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
