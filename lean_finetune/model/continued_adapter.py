"""Go on from an adapter (model.adapter): check that it has the parameters of the run, and load its weights."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from peft import PeftModel, get_peft_model_state_dict
from torch import nn
from transformers import PretrainedConfig

from lean_finetune.config.schema import Train
from lean_finetune.core.errors import UserError, shortened
from lean_finetune.islands.tower import TOWER
from lean_finetune.model.adapter_init import PEFT_PREFIX
from lean_finetune.model.adapters import SCORES, add_adapters
from lean_finetune.model.beside.parts import adapted_parts, other_copies
from lean_finetune.model.empty_model import SCORE, ScoredModel, language_head, meta_model, scoring_class
from lean_finetune.model.files.finite_values import of_adapter, refuse_not_finite
from lean_finetune.model.files.safetensors_files import stored_tensors
from lean_finetune.model.trained_rows import saved_token_ids
from lean_finetune.pinning.adapter_files import AGAIN, LORA, MERGE_FIRST, adapter_tensors, fault, read_adapter
from lean_finetune.pinning.config_file import ADAPTER_CONFIG, ADAPTER_WEIGHTS

T = TypeVar("T")
HEADS_OF_SCORES = ("classifier", "score")
"""Heads that PEFT saves with the adapter of a reward model, whatever it is told to save."""
UNUSED = ("bias", "layer_replication", "layers_to_transform", "lora_bias", "use_qalora")
"""Keys of adapter_config.json that no parameter here expresses."""


def refuse_other_adapter(directory: Path, train: Train, config: PretrainedConfig) -> None:
    """Refuse an adapter that differs from what `train` would add to the model, in one line with both values.

    `train.lora` says what training builds; an adapter of another rank would need another prediction.

    Raises:
        UserError: its kind, rank, scale, targets or shapes differ, or its file lacks tensors.
    """
    adapter = read_adapter(directory)
    _refuse_kind(directory, adapter, train)
    found = without_other_head(adapter_tensors(directory), config)
    _refuse_trained_parts(directory, found, train)
    _refuse_values(directory, _values_of(adapter, found, config), train)
    model, base = meta_model(config), _of_base(adapter, config)
    modules = dict(model.named_modules())
    wanted = {name: tuple(tensor.shape) for name, tensor in start_names(_on_meta(model, train), adapter).items()}
    _refuse_layers(
        directory, adapter, train, {_layer(name) for name in found}, {_layer(name) for name in wanted}, modules, base
    )
    for name, shape in wanted.items():
        if name not in found:
            raise fault(directory / ADAPTER_WEIGHTS, f"has no {name}")
        if found[name].shape != shape:
            raise fault(
                directory / ADAPTER_WEIGHTS,
                f"has {name} of shape {_shown(found[name].shape)}, and the model needs {_shown(shape)}",
                base,
            )
    if unknown := sorted(found.keys() - wanted.keys()):
        raise fault(directory / ADAPTER_WEIGHTS, f"has {unknown[0]}, which training here has not", MERGE_FIRST)


def _of_base(adapter: Mapping[str, Any], config: PretrainedConfig) -> str:
    """The remedy for an adapter of another model."""
    base = shortened(adapter["base_model_name_or_path"])
    return f"it is an adapter of {base}, and the model is {config.name_or_path}: name the adapter's base in model.name"


def _on_meta(model: Any, train: Train) -> PeftModel:
    with torch.device("meta"):
        return add_adapters(model, train, seed=None)


def _refuse_kind(directory: Path, adapter: Mapping[str, Any], train: Train) -> None:
    """Refuse what no parameter of params.yaml says, and a reward model's adapter for another objective."""
    path = directory / ADAPTER_CONFIG
    if adapter.get("task_type") == SCORES and not train.scores:
        raise fault(
            path,
            f"is that of a reward model, and train.objective is {train.objective}",
            "set train.objective=reward, or name another adapter",
        )
    for key in UNUSED:
        if (value := adapter.get(key)) and value != "none":
            raise fault(path, f"has {key}={shortened(str(value))}, which is not trained here", MERGE_FIRST)
    patterns = {**(adapter.get("rank_pattern") or {}), **(adapter.get("alpha_pattern") or {})}
    if other := sorted(patterns.keys() - set(_expert_targets(adapter))):
        raise fault(path, f"has another rank or scale for {other[0]}", MERGE_FIRST)


def _refuse_trained_parts(directory: Path, tensors: Iterable[str], train: Train) -> None:
    """Refuse an adapter with a part that was trained in full where the run does not so, and the reverse."""
    for part, mode in adapted_parts(tensors).items():
        wanted = TOWER.modes(train)[part]
        if (mode == "full") != (wanted == "full"):
            needed = "full" if mode == "full" else "lora, or frozen"
            raise UserError(f"train.{part}: must be {needed}, as in model.adapter={directory}; got {wanted}; change it")


def _expert_targets(adapter: Mapping[str, Any]) -> list[str]:
    """Parameters of experts that an adapter adapts; see `save_adapter` for other names with `.weight`."""
    return [name for name in adapter.get("target_parameters") or () if not name.endswith(".weight")]


def _values_of(adapter: Mapping[str, Any], tensors: Iterable[str], config: PretrainedConfig) -> dict[str, Any]:
    """The values of `train.lora` that an adapter was made with, by key; without heads that a reward model trains."""
    experts = _expert_targets(adapter)
    copies = set(other_copies(adapter, tensors))
    if scoring_class(config) is not None:
        copies -= {*HEADS_OF_SCORES, language_head(config)}
    values: dict[str, Any] = {
        "rank": adapter["r"],
        "alpha": adapter["lora_alpha"],
        "rslora": bool(adapter.get("use_rslora")),
        "dora": bool(adapter.get("use_dora")),
        "experts": "all" if experts else "none",
        "modules_to_save": sorted(copies),
        "trainable_tokens": saved_token_ids(adapter),
    }
    if experts:
        values["expert_rank"] = (adapter.get("rank_pattern") or {}).get(experts[0], adapter["r"])
    return values


def _refuse_values(directory: Path, values: Mapping[str, Any], train: Train) -> None:
    """Raise UserError for the first value that differs, with the flags that set all of them."""
    differ = {key: value for key, value in values.items() if _sorted(getattr(train.lora, key)) != value}
    if differ:
        first, value = next(iter(differ.items()))
        got = getattr(train.lora, first)
        flags = " ".join(f"train.lora.{key}={_text(one)}" for key, one in differ.items())
        raise UserError(
            f"train.lora.{first}: must be {_text(value)}, as in model.adapter={directory}; got {_text(got)}; set "
            f"{flags}"
        )


def _sorted(value: Any) -> Any:
    return sorted(value) if isinstance(value, list) else value


def _refuse_layers(
    directory: Path,
    adapter: Mapping[str, Any],
    train: Train,
    found: set[str],
    wanted: set[str],
    modules: Mapping[str, nn.Module],
    base: str,
) -> None:
    """Refuse an adapter of other layers than those of train.lora.targets; `base` is the remedy if its model differs."""
    if found == wanted:
        return
    path = directory / ADAPTER_WEIGHTS
    if foreign := sorted(layer for layer in found - wanted if layer.removesuffix(".base_layer") not in modules):
        raise fault(path, f"adapts {foreign[0]}, which the model has not", base)
    targets = adapter.get("target_modules")
    named = targets if isinstance(targets, list) else []
    if lost := sorted(layer for layer in wanted - found if _matches(layer, named)):
        raise fault(path, f"has no tensors of {lost[0]}, which {ADAPTER_CONFIG} names", f"{AGAIN}; {base}")
    names = sorted({layer.rpartition(".")[2] for layer in found})
    if any(_matches(layer, names) and layer not in found for layer in modules):
        some = f"adapts some of the layers that are called {', '.join(names)}, not all"
        raise fault(path, some, f"{MERGE_FIRST}; {base}")
    raise UserError(
        f"train.lora.targets: must be {_text(names)}, as in model.adapter={directory}; got "
        f"{_text(list(train.lora.targets))}; set train.lora.targets={_text(names)}"
    )


def _matches(layer: str, names: Iterable[str]) -> bool:
    return any(layer == name or layer.endswith(f".{name}") for name in names)


def _layer(name: str) -> str:
    """The layer of a saved tensor."""
    return name.removeprefix(PEFT_PREFIX).partition(LORA)[0]


def _text(value: Any) -> str:
    """A value as params.yaml and the command line have it."""
    return (
        f"[{','.join(map(str, value))}]"
        if isinstance(value, list)
        else str(value).lower()
        if isinstance(value, bool)
        else str(value)
    )


def _shown(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape))


def start_names(model: PeftModel, adapter: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The trained tensors that an adapter has to have, by their names there: all but a reward model's new head."""
    names = saved_names(model)
    if adapter.get("task_type") != SCORES and isinstance(model.get_base_model(), ScoredModel):
        names.pop(f"{PEFT_PREFIX}{SCORE}.weight")
    return names


def without_other_head(tensors: Mapping[str, T], config: PretrainedConfig) -> dict[str, T]:
    """The tensors of an adapter's file but those of a language model's head, which a reward model has not."""
    if scoring_class(config) is None:
        return dict(tensors)
    head = f"{PEFT_PREFIX}{language_head(config)}."
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(head)}


def saved_names(model: PeftModel) -> dict[str, torch.Tensor]:
    """The trained tensors by their names in a saved adapter; they share memory with the model's."""
    trained = {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}
    found: dict[str, torch.Tensor] = get_peft_model_state_dict(model, state_dict=trained, save_embedding_layers=False)
    return found


@torch.no_grad()
def load_start(model: PeftModel, directory: Path) -> None:
    """Overwrite the new adapters of a model by those in a directory, one tensor at a time.

    Raises:
        UserError: the file lacks one, or has one of another shape (see `refuse_other_adapter`) or with NaN.
    """
    path = directory / ADAPTER_WEIGHTS
    base: Any = model.get_base_model()
    stored = without_other_head(stored_tensors(path), base.config)
    wanted = start_names(model, read_adapter(directory))
    if stored.keys() != wanted.keys():
        raise fault(path, f"has other tensors than the model: {sorted(stored.keys() ^ wanted.keys())[0]}")
    for name, tensor in wanted.items():
        if stored[name].shape != tuple(tensor.shape):
            raise fault(path, f"has {name} of shape {_shown(stored[name].shape)}, not {_shown(tuple(tensor.shape))}")
        value = stored[name].read()
        refuse_not_finite([(name, value)], of_adapter(path))
        tensor.copy_(value.to(tensor.dtype))
