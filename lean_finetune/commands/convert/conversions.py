"""Values of other tools in the types of our parameters."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from math import ceil, isfinite
from typing import Any

from lean_finetune.commands.convert.converted import Converted

Conversion = Callable[[str, Any, Converted], Any]
"""Of a key, its value and the result so far to the value here. Raises ValueError, whose text is the rule."""


def _number(key: str, value: Any, converted: Converted) -> float:
    if isinstance(value, int | float | str):
        with suppress(ValueError):
            return float(value)
    raise ValueError("must be a number")


def _whole(key: str, value: Any, converted: Converted) -> int:
    if not (number := _number(key, value, converted)).is_integer():
        raise ValueError("must be a whole number")
    return int(number)


def _count(key: str, value: Any, converted: Converted) -> float:
    number = _number(key, value, converted)
    return int(number) if number.is_integer() else number


def _positive(key: str, value: Any, converted: Converted) -> int:
    if (number := _whole(key, value, converted)) < 1:
        raise ValueError("must be at least 1")
    return number


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
    if value in ("all", "all-linear", ["all"], ["all-linear"]):
        return ["all-linear"]
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list):
        raise ValueError("must be names of layers")
    return [str(name).strip() for name in names]


def _data_sets(key: str, value: Any, converted: Converted) -> list[Any]:
    listed = value.split(",") if isinstance(value, str) else value
    if not isinstance(listed, list) or not all(isinstance(entry, str | Mapping) for entry in listed):
        raise ValueError("must be names of data sets")
    return [entry.strip() if isinstance(entry, str) else entry for entry in listed]


def _text(key: str, value: Any, converted: Converted) -> str:
    if not isinstance(value, str):
        raise ValueError("must be a text")
    return value


def _max_norm(key: str, value: Any, converted: Converted) -> float | None:
    return _number(key, value, converted) or None


def _model(key: str, value: Any, converted: Converted) -> str:
    return _text(key, value, converted).rstrip("/")


PARAMETERS: Mapping[str, Conversion] = {
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
    "train.lora.rank": _whole,
    "train.lora.experts": lambda key, value, converted: "all",
    "train.context_parallel": _positive,
    "data.max_rows": _positive,
}
"""By parameter."""
FACTS: Mapping[str, Conversion] = {
    **dict.fromkeys(("length", "rows", "accumulation", "step_rows"), _positive),
    **dict.fromkeys(("warmup_steps", "max_steps"), _count),
    **dict.fromkeys(("dataset", "eval_dataset"), _data_sets),
    **dict.fromkeys(("component", "dataset_dir"), _text),
    "attention_targets": _targets,
}
"""By fact of the tables."""
