"""Turn a configuration of LLaMA-Factory, Axolotl, TRL or torchtune into our parameters."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from math import ceil, isfinite
from pathlib import Path
from typing import Any

from lean_finetune.commands.convert.converted import Converted
from lean_finetune.commands.convert.facts import combine_facts
from lean_finetune.config.other_tools import Table, shared, tables
from lean_finetune.core.errors import UserError, shortened
from lean_finetune.core.read_yaml import read_yaml

Conversion = Callable[[str, Any, Converted], Any]
"""Of a key, its value and the result so far to the value here. Raises ValueError, whose text is the rule."""
DATA_FACTS = ("dataset", "eval_dataset", "dataset_dir")
BOOLEANS = {"yes": True, "on": True, "true": True, "no": False, "off": False, "false": False}
"""Words that the other tools read as booleans: they read YAML 1.1."""


def read_config_of_tool(path: Path, gpus: int, *, with_data: bool = True) -> Converted:
    """Convert a configuration file for a run on so many GPUs; `with_data=False` leaves its data sets out.

    Raises:
        UserError: it is not YAML, of no known tool, or of a run or data that cannot be had here.
    """
    content = read_yaml(path, "file does not exist; name a configuration of another tool", "name another")
    if not isinstance(content, Mapping):
        got = "an empty file" if content is None else type(content).__name__
        raise UserError(f"{path}: must be a mapping of keys; got {got}; name another")
    given = {key: value for key, value in _flat(content) if value is not None}
    table = _table_of(given, path)
    converted = Converted(tool=table["tool"])
    facts: dict[str, Any] = {}
    defaults = {key: value for key, value in (table.get("defaults") or {}).items() if key not in given}
    for key, value in {**defaults, **given}.items():
        rule = table["keys"].get(key)
        reason = next((reason for reason, keys in table["ignored"].items() if key in keys), None)
        if not with_data and isinstance(rule, Mapping) and rule.get("fact") in DATA_FACTS:
            if key not in given:
                continue
            reason = "a prediction needs no data"
        elif rule is not None:
            _apply(rule, key, value, converted, facts, path, is_given=key in given)
            continue
        (converted.unknown if reason is None else converted.ignored.setdefault(reason, [])).append(key)
    combine_facts(facts, converted, table, gpus, path)
    return converted


def _flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values by dotted key."""
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", BOOLEANS.get(value.lower(), value) if isinstance(value, str) else value


def _table_of(given: Mapping[str, Any], path: Path) -> Table:
    """The table of the tool with the most keys of the configuration."""
    found = [table for table in tables() if any(key in given for key in table["known_by"])]
    if not found:
        names = ", ".join(table["tool"] for table in tables())
        keys = shortened(", ".join(list(given)[:5]))
        raise UserError(f"{path}: must be a configuration of {names}; got keys {keys}; name another")
    return max(found, key=lambda table: sum(key in table["keys"] for key in given))


def _apply(
    rule: Any, key: str, value: Any, converted: Converted, facts: dict[str, Any], path: Path, *, is_given: bool
) -> None:
    """Apply a table's rule to the value of a key."""
    rule = {"to": rule} if isinstance(rule, str) else rule
    values = rule.get("values")
    if values is not None:
        values = shared()[values] if isinstance(values, str) else values
        if isinstance(value, list) or value not in values:
            if "refuse" in rule:
                remedy = f"change it, or run it with {converted.tool}"
                raise UserError(f"{path}: {key}: {rule['refuse']}; got {shortened(str(value))}; {remedy}")
            kept = f"; {rule['to']} stays as it is by default" if "to" in rule else ""
            converted.differs.append(f"{key}={shortened(str(value))} is not known here{kept}")
            return
        value = values[value]
    if value is None:
        if is_given:
            converted.used[key] = "as here"
    elif "to" in rule:
        ours = rule["to"]
        converted.values[ours] = _convert(CONVERSIONS.get(ours), key, value, converted, path)
        if is_given:
            converted.used[key] = ours
    elif "fact" in rule:
        _convert(FACT_TYPES.get(rule["fact"]), key, value, converted, path)
        if rule["fact"] == "mixed" and facts.get("mixed", value) != value:
            raise UserError(f"{path}: {key}: must be one precision; got {facts['mixed']} and {value}; remove one")
        facts[rule["fact"]] = value
        if is_given:
            converted.used[key] = str(shared()["facts"].get(rule["fact"], "")).partition(" (")[0] or "as here"


def _convert(convert: Conversion | None, key: str, value: Any, converted: Converted, path: Path) -> Any:
    """A value of the tool in our type. Raises UserError if it is of another."""
    if convert is None:
        return value
    try:
        return convert(key, value, converted)
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError(f"{path}: {key}: {error}; got {shortened(repr(value))}; correct it") from None


def _number(key: str, value: Any, converted: Converted) -> float:
    if isinstance(value, int | float | str):
        with suppress(ValueError):
            return float(value)
    raise ValueError("must be a number")


def _whole(key: str, value: Any, converted: Converted) -> int:
    if not (number := _number(key, value, converted)).is_integer():
        raise ValueError("must be a whole number")
    return int(number)


def _epochs(key: str, value: Any, converted: Converted) -> int:
    epochs = _number(key, value, converted)
    if not isfinite(epochs):
        raise ValueError("must be a finite number")
    if (whole := max(1, ceil(epochs))) != epochs:
        converted.differs.append(f"{key}={value}: whole passes only, so {whole}")
    return whole


def _share(key: str, value: Any, converted: Converted) -> float:
    if (share := _number(key, value, converted)) < 1:
        return share
    converted.differs.append(f"{key}={value} is a number of rows; data.heldout_fraction is a share: 0.05")
    return 0.05


def _targets(key: str, value: Any, converted: Converted) -> list[str]:
    if value in ("all", "all-linear"):
        return ["all-linear"]
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list):
        raise ValueError("must be names of layers")
    return [str(name).strip() for name in names]


def _data_sets(key: str, value: Any, converted: Converted) -> list[Any]:
    listed = value.split(",") if isinstance(value, str) else value
    if not isinstance(listed, list) or not all(isinstance(entry, str | Mapping) for entry in listed):
        raise ValueError("must be names of data sets")
    return listed


def _text(key: str, value: Any, converted: Converted) -> str:
    if not isinstance(value, str):
        raise ValueError("must be a text")
    return value


def _max_norm(key: str, value: Any, converted: Converted) -> float | None:
    return _number(key, value, converted) or None


def _model(key: str, value: Any, converted: Converted) -> str:
    return str(value).rstrip("/")


CONVERSIONS: Mapping[str, Conversion] = {
    "train.epochs": _epochs,
    "data.heldout_fraction": _share,
    "train.lora.targets": _targets,
    "train.max_grad_norm": _max_norm,
    "model.name": _model,
    "train.lr": _number,
    "train.weight_decay": _number,
    "train.warmup_fraction": _number,
    "train.lora.dropout": _number,
    "train.lora.alpha": _whole,
    "train.lora.experts": lambda key, value, converted: "all",
}
"""Values in our types, by parameter."""
FACT_TYPES: Mapping[str, Conversion] = {
    **dict.fromkeys(("length", "rows", "accumulation"), _whole),
    **dict.fromkeys(("warmup_steps", "max_steps"), _number),
    **dict.fromkeys(("dataset", "eval_dataset"), _data_sets),
    **dict.fromkeys(("component", "dataset_dir"), _text),
    "attention_targets": _targets,
}
"""Types of facts."""
