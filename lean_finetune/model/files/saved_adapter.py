"""The config with which PEFT loads a saved adapter: names of layers in place of a stranger's patterns."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from peft import LoraConfig
from torch import nn

from lean_finetune.pinning.adapter_config import ALL_LINEAR, AdaptedLayers
from lean_finetune.pinning.adapter_files import (
    AGAIN,
    adapter_tensors,
    fault,
    layer_name,
    pattern_faults,
    read_adapter,
)
from lean_finetune.pinning.config_file import ADAPTER_CONFIG, ADAPTER_WEIGHTS

KEPT_KEYS = (
    *("task_type", "r", "lora_alpha", "lora_dropout", "use_dora", "use_rslora", "fan_in_fan_out", "bias", "lora_bias"),
    *("modules_to_save", "trainable_token_indices", "ensure_weight_tying"),
)
"""What PEFT gets as it is: it changes the loaded model, and has no patterns."""


def saved_config(directory: Path, model: nn.Module) -> LoraConfig:
    """The config of a saved adapter for a model.

    Layers that it names by their weights (see `save_adapter`) are layers. How adapters start is left out, since their
    weights are loaded.

    Raises:
        UserError: a file is wrong, or the config has other layers or larger ranks than the weights.
    """
    adapter = dict(read_adapter(directory))
    parameters = adapter.get("target_parameters") or []
    if layers := [name.removesuffix(".weight") for name in parameters if name.endswith(".weight")]:
        targets = adapter.get("target_modules") or []
        by_name = rf"(?:.*\.)?(?:{_any_of(layers)})"
        adapter["target_modules"] = f"{targets}|{by_name}" if isinstance(targets, str) else [*targets, *layers]
    stacked = _parameters(model, [name for name in parameters if not name.endswith(".weight")])
    with pattern_faults(directory):
        named = AdaptedLayers(adapter)
        names = [name for name, _ in model.named_modules() if name]
        excluded = [name for name in names if named.excludes(name)]
        targets = [name for name in names if named.has(name)] if named.are_listed else []
        adapted = [*(targets if named.are_listed else names), *stacked]
        ranks = {name: named.rank(name) for name in adapted}
        alphas = {name: named.alpha(name) for name in adapted}
    if named.are_listed:
        _refuse_others(directory, {name: ranks[name] * stacked.get(name, 1) for name in adapted}, names, named)
    kept = {key: adapter[key] for key in KEPT_KEYS if adapter.get(key) is not None}
    return LoraConfig(
        **kept,
        target_modules=(_any_of(targets) or []) if named.are_listed else ALL_LINEAR,
        target_parameters=sorted(stacked) or None,
        exclude_modules=_any_of(excluded),
        rank_pattern=_by_value(ranks, adapter["r"]),
        alpha_pattern=_by_value(alphas, adapter["lora_alpha"]),
    )


def _parameters(model: nn.Module, ends: Iterable[str]) -> dict[str, int]:
    """The parameters of a model whose names end so, with the number of matrices that each stacks."""
    ends = tuple(ends)
    return {
        name: math.prod(parameter.shape[:-2])
        for name, parameter in model.named_parameters()
        if ends and f".{name}".endswith(tuple(f".{end}" for end in ends))
    }


def _refuse_others(directory: Path, rows: Mapping[str, int], modules: Iterable[str], named: AdaptedLayers) -> None:
    """Refuse an adapter whose config and weights have other layers; `rows` are those of A by the config.

    PEFT would make matrices of all that the config names, and leave out weights that it does not name. Layers may have
    other names in the file, since classes of transformers were rebuilt, so that mostly the numbers are compared.
    """
    path = directory / ADAPTER_WEIGHTS
    found: dict[str, int] = defaultdict(int)
    for name, tensor in adapter_tensors(directory).items():
        if ".lora_A." in name or ".lora_embedding_A" in name:
            found[layer_name(name)] += tensor.shape[0]
    if not rows:
        raise fault(directory / ADAPTER_CONFIG, "names no layer of the model", AGAIN)
    if sum(rows.values()) > sum(found.values()):
        name = next(name for name in rows if rows[name] > found.get(name, 0))
        raise fault(path, f"has no tensors of {name} of rank {rows[name]}, which {ADAPTER_CONFIG} names")
    if lost := [name for name in modules if name in found and not (name in rows or named.has_experts(name))]:
        raise fault(path, f"has tensors of {lost[0]}, which {ADAPTER_CONFIG} does not name")


def _any_of(names: Iterable[str]) -> str | None:
    """A pattern that matches these names alone; None without any."""
    return "|".join(map(re.escape, names)) or None


def _by_value(values: Mapping[str, Any], usual: Any) -> dict[str, Any]:
    """PEFT's `rank_pattern` or `alpha_pattern` for the layers whose value is not the usual one."""
    names: dict[Any, list[str]] = defaultdict(list)
    for name, value in values.items():
        if value != usual:
            names[value].append(name)
    return {f"^(?:{_any_of(those)})": value for value, those in names.items()}
