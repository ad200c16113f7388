"""Adapters: which layers get one, and how they are made."""

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.utils.other import ModulesToSaveWrapper
from safetensors.torch import load_file
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lean_finetune.config.field_types import ALL_LINEAR
from lean_finetune.config.model_families import family_of
from lean_finetune.config.schema import BaseWeights, Train
from lean_finetune.core.atomic_files import read_json, write_json
from lean_finetune.core.errors import UserError, shortened
from lean_finetune.islands.tower import TOWER
from lean_finetune.model.adapter_init import (
    ADAPTER,
    PEFT_PREFIX,
    adapted_layers,
    first_adapters,
    on_original_weights,
    refuse_start,
)
from lean_finetune.model.beside.parts import (
    adapted_parts,
    fully_trained_modules,
    other_copies,
    refuse_unadapted,
    unadapted_layers,
)
from lean_finetune.model.beside.trained_parts import forget_originals, train_parts
from lean_finetune.model.empty_model import ScoredModel, left_out, meta_model, pattern_of, token_layers
from lean_finetune.model.experts.expert_adapters import (
    ExpertAdapter,
    GroupedAdapter,
    linear_targets,
    multiply_by_rows,
    names_as_given,
    names_of_experts,
    target_experts,
    target_name,
)
from lean_finetune.model.experts.experts_forward import gates, has_experts
from lean_finetune.model.files.finite_values import of_adapter, refuse_not_finite
from lean_finetune.model.files.safetensors_files import write_loaded
from lean_finetune.model.files.saved_adapter import saved_config
from lean_finetune.model.precision import adapter_dtype, base_dtype
from lean_finetune.model.quantize import keep_trainable_on_cpu
from lean_finetune.model.trained_rows import add_rows, compute_rows_alone, saved_token_ids, token_ids, token_indices
from lean_finetune.patches.of_models import INPUTS_AS_AUTOCAST
from lean_finetune.pinning.adapter_files import MERGE_FIRST, adapter_tensors, fault
from lean_finetune.pinning.config_file import ADAPTER_CONFIG, ADAPTER_WEIGHTS


def adapts_by_name(model: PreTrainedModel) -> bool:
    """Whether `all-linear` must be expanded to names, because peft's would include layers that get no adapter."""
    return has_experts(model) or bool(gates(model)) or bool(_read_directly(model))


def _read_directly(model: PreTrainedModel) -> frozenset[str]:
    """Names of the layers of a model whose weight its code reads without calling the layer."""
    return family_of(model.config.get_text_config().model_type).read_directly


def all_linear_targets(model: PreTrainedModel) -> list[str]:
    """The names that `all-linear` is expanded to."""
    return sorted(set(linear_targets(model, _linear_layers(model))) - _read_directly(model))


def _linear_layers(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """The linear layers of a model by path, without its head."""
    head = model.get_output_embeddings()
    return {path: m for path, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head}


def adaptable_layers(model: PreTrainedModel) -> list[nn.Linear]:
    """The layers that `all-linear` adapts if it is expanded to names."""
    names = set(all_linear_targets(model))
    return [layer for path, layer in _linear_layers(model).items() if target_name(path) in names]


def layers_without_adapters(model: PreTrainedModel, train: Train) -> list[str]:
    """Names of the linear layers that `all-linear` leaves out, apart from the head and routers."""
    if not train.adapted or not train.lora.all_linear or not adapts_by_name(model):
        return []
    routers = gates(model)
    names = {target_name(path) for path in _linear_layers(model) if path not in routers}
    return sorted(names.difference(all_linear_targets(model)))


def refuse_targets(model: PreTrainedModel, train: Train) -> None:
    """Refuse names that peft would ignore silently, or whose adapters it could not load."""
    modules, targets = dict(model.named_modules()), train.lora.targets
    linear = {name for name, module in modules.items() if isinstance(module, (nn.Linear, Conv1D))}
    wrong = []
    for target in targets:
        named = [name for name in modules if name == target or name.endswith(f".{target}")]
        if not named or not linear.issuperset(named):
            wrong.append(target)
        elif any(modules[name].weight is model.get_input_embeddings().weight for name in named):
            raise UserError(
                f"train.lora.targets: {target} shares its weight with the embedding, and a change of it cannot be "
                f"merged; got {list(targets)}; leave it out"
            )
    family, last_names = model.config.model_type, {target.rpartition(".")[2] for target in targets}
    if (train.lora.dropout or train.lora.dora) and (renamed := names_of_experts(model).intersection(last_names)):
        raise UserError(
            f"train.lora.targets: peft cannot load adapters of {sorted(renamed)[0]} of {family} with dropout or DoRA; "
            f"got {list(targets)}; set train.lora.dropout=0.0 and train.lora.dora=false, or leave it out"
        )
    if direct := _read_directly(model).intersection(last_names):
        raise UserError(
            f"train.lora.targets: {family} reads the weight of {sorted(direct)[0]} without calling the layer, so an "
            f"adapter has no effect; got {list(targets)}; leave it out"
        )
    if wrong:
        known = ", ".join(sorted(linear_names(model)))
        experts = "; train.lora.experts=all adapts the experts" if has_experts(model) else ""
        got = shortened(str(wrong))
        raise UserError(
            f"train.lora.targets: must name linear layers of the model; got {got}; known: {known}, or {ALL_LINEAR}"
            f"{experts}"
        )


def refuse_modules(model: PreTrainedModel, train: Train) -> None:
    """Refuse names of train.lora.modules_to_save other than those of the embedding and the head.

    Raises:
        UserError: naming those that the model has.
    """
    names = train.lora.modules_to_save
    if not names:
        return
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    layers, modules = token_layers(model), dict(model.named_modules())
    known = [path.rpartition(".")[2] for path, module in modules.items() if module in layers]
    for name in names:
        paths = [path for path in modules if path == name or path.endswith(f".{name}")]
        if len(paths) != 1 or modules[paths[0]] not in layers:
            if (part := TOWER.kind_of_modules(name, paths)) is not None:
                raise UserError(
                    f"train.lora.modules_to_save: names the embedding and the head alone; got {name}; set "
                    f"train.{part}=full instead"
                )
            kind = "the embedding or the head"
            if train.scores:
                kind = "the embedding (a reward model's head is trained anyway)"
            raise UserError(
                f"train.lora.modules_to_save: must name {kind}, {' or '.join(known)}; got {name}; leave it out"
            )
        if name in train.lora.targets:
            raise UserError(
                f"train.lora.modules_to_save: {name} is trained in full and has an adapter too; got it in "
                "train.lora.targets; leave it out of one"
            )
    if head is not None and head.weight is embedding.weight:
        raise UserError(
            f"train.lora.modules_to_save: {' and '.join(known)} share their weight, and a copy of one would separate "
            f"them, so that the merged model is another one; got {names}; set it to []"
        )


def linear_names(model: PreTrainedModel) -> set[str]:
    """The last name parts of all linear layers, except a head that shares the embedding's weight."""
    shared = model.get_input_embeddings().weight
    linear = (pair for pair in model.named_modules() if isinstance(pair[1], (nn.Linear, Conv1D)))
    return {name.rpartition(".")[2] for name, module in linear if module.weight is not shared}


# Add LoRA adapters to a model, save them and load them, with peft.

SCORES = "SEQ_CLS"
"""What adapter_config.json calls the adapter of a reward model."""
MOST_REASON = 300
"""Characters that are shown of another library's error."""
ADAPTER_NAMES = (
    *("lora_A.", "lora_B.", "lora_magnitude_vector."),
    *(f".modules_to_save.{ADAPTER}.", ".trainable_tokens_delta."),
)
"""Parts of the names of adapter parameters."""


def add_adapters(model: PreTrainedModel, train: Train, *, seed: int | None) -> PeftModel:
    """Freeze the model and add LoRA adapters to its target layers; `seed` seeds A, and B is zero.

    `seed` is None for a model on the meta device, where nothing is drawn.

    Raises:
        UserError: train.lora.targets names layers that cannot have adapters.
    """
    if not train.lora.all_linear:
        refuse_targets(model, train)
    if train.lora.experts == "all" and not has_experts(model):
        raise UserError(
            f"train.lora.experts: {model.config.model_type} has no experts that can have adapters; got all; use none"
        )
    refuse_modules(model, train)
    add_rows(model, token_ids(train))
    known = linear_names(model)
    by_name = adapts_by_name(model) and train.lora.all_linear
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    targets = ALL_LINEAR if train.lora.all_linear else train.lora.targets
    if by_name:
        targets = all_linear_targets(model)
    config = LoraConfig(
        r=train.lora.rank,
        lora_alpha=train.lora.alpha,
        lora_dropout=train.lora.dropout,
        target_modules=targets,
        # Layers of the same names in the parts that text never reaches: the adapter is for the complete model.
        exclude_modules=pattern_of(
            [*left_out(model), *unadapted_layers(model, train), *(_others_of_names(model, targets) if by_name else ())]
        ),
        use_rslora=train.lora.rslora,
        use_dora=train.lora.dora,
        modules_to_save=[*train.lora.modules_to_save] or None,  # peft appends to the list.
        trainable_token_indices=token_indices(model, train),
        # peft then trains the head of a reward model in full, and saves it with the adapter.
        task_type=SCORES if train.scores else "CAUSAL_LM",
    )
    if train.lora.experts == "all":
        target_experts(config, model, train.lora.expert_rank)
    if seed is not None:
        torch.manual_seed(seed)
    trained_parts = fully_trained_modules(model, TOWER.modes(train))
    try:
        with _without_peft_warnings(), names_as_given():
            adapted = get_peft_model(model, config, autocast_adapter_dtype=True, low_cpu_mem_usage=seed is None)
    except ValueError as error:  # Mamba's kernels read some weights outside of their layers' forward.
        reason = str(error).splitlines()[0].rpartition("] ")[2].partition(". ")[0]
        raise UserError(
            f"train.lora.targets: must be layers that can have adapters; got {train.lora.targets} "
            f"({reason}); name others of {', '.join(sorted(known))}"
        ) from None
    train_parts(adapted, trained_parts)
    refuse_unadapted(adapted, train)
    refuse_start(adapted, train)
    multiply_by_rows(adapted)
    compute_rows_alone(adapted)
    _cast_adapters(adapted, train)
    return adapted


def _others_of_names(model: PreTrainedModel, names: Iterable[str]) -> list[str]:
    """Layers with these names that are not linear: a tower's convolution `proj`, named like a layer of attention."""
    return [
        path
        for path, module in model.named_modules()
        if path.rpartition(".")[2] in names and not isinstance(module, nn.Linear) and not any(module.children())
    ]


def _cast_adapters(model: PeftModel, weights: BaseWeights) -> None:
    """Convert the adapters, which peft makes fp32, to their type; under autocast do not convert inputs for them."""
    for name, parameter in model.named_parameters():
        if any(part in name for part in ADAPTER_NAMES):
            parameter.data = parameter.data.to(adapter_dtype(weights))
    for name, module in model.named_modules():
        if not isinstance(module, ModulesToSaveWrapper):
            continue
        if isinstance(module.original_module, nn.Embedding) or TOWER.is_beside(name):
            # The model expects what it computes in the type of its other weights, which autocast does not give. So the
            # activations between a tower's layers have 16 bits.
            module.modules_to_save[ADAPTER].register_forward_hook(partial(_as_type, dtype=base_dtype(weights)))
    # Autocast would convert peft's fp32 copy of an input back, and save that. Dropout and DoRA compute with the copy.
    layers: Iterator[Any] = (m for m in model.modules() if isinstance(m, LoraLayer))
    for layer in (one for one in layers if isinstance(one.get_base_layer(), nn.Linear) and not one.lora_variant):
        if all(isinstance(dropout, nn.Identity) for dropout in layer.lora_dropout.values()):
            INPUTS_AS_AUTOCAST.give_method(layer, _cast_without_autocast)


def _as_type(module: nn.Module, inputs: Any, output: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """The output of a module in another type."""
    return output.to(dtype)


def _cast_without_autocast(inputs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The input of an adapter in its type, unless autocast decides the type."""
    return inputs if torch.is_autocast_enabled(inputs.device.type) else inputs.to(dtype)


def save_adapter(
    model: PeftModel,
    directory: Path,
    base_name: str,
    tensors: Mapping[str, torch.Tensor] | None = None,
    *,
    revision: str | None = None,
) -> None:
    """Write adapter_model.safetensors and adapter_config.json, equal bytes for equal weights.

    This sorts target names, which peft keeps in a set. Layers whose names peft takes for those of experts are named by
    their weights, as `target_parameters`. An adapter whose start changed the frozen weights (PiSSA) is rewritten.

    Args:
        model: with the adapters.
        directory: where to write.
        base_name: written as the base's name; the directory it was loaded from may be temporary.
        tensors: the adapters by the model's names, if the model has shards of them only.
        revision: the base's revision on the hub.
    """
    # "auto" would ask the hub whether the embedding was resized; ours never is.
    model.save_pretrained(str(directory), safe_serialization=True, save_embedding_layers=False, state_dict=tensors)
    (directory / "README.md").unlink(missing_ok=True)
    file, path = directory / ADAPTER_WEIGHTS, directory / ADAPTER_CONFIG
    saved = load_file(file)
    if tensors is not None and len(saved) < len(tensors):  # peft left out a pipeline's other stages.
        saved = {name.replace(f".{ADAPTER}.", "."): tensor for name, tensor in tensors.items()}
    config = {key: _ordered(value) for key, value in _named_for_peft(model, read_json(path)).items()}
    if first := first_adapters(model):
        scale = next(layer.scaling[ADAPTER] for _, layer in adapted_layers(model))
        saved, config = on_original_weights(saved, config, first, scale)
    file.unlink()  # safetensors' own writer lets only the owner read it, whatever the umask.
    write_loaded(file, saved)
    write_json(path, {**config, "base_model_name_or_path": base_name, "revision": revision})


def _named_for_peft(model: PeftModel, config: Mapping[str, Any]) -> dict[str, Any]:
    """The content of adapter_config.json, with layers named by their weights where peft takes them for experts."""
    names = names_of_experts(model)
    renamed = [f"{path}.weight" for path, _ in adapted_layers(model) if path.rpartition(".")[2] in names]
    if not renamed:
        return dict(config)
    modules = [target for target in config["target_modules"] if target.rpartition(".")[2] not in names]
    return {**config, "target_modules": modules, "target_parameters": [*(config["target_parameters"] or ()), *renamed]}


def _ordered(value: Any) -> Any:
    """A list of names in sorted order; anything else unchanged."""
    return sorted(value) if isinstance(value, list) and all(isinstance(v, str) for v in value) else value


def load_adapter(model: PreTrainedModel, directory: Path, weights: BaseWeights) -> PeftModel:
    """Load a saved adapter onto its base, frozen.

    If it has parts beside decoder and head that were trained in full, there is no model without the adapter.

    Raises:
        UserError: the adapter's files are missing or do not fit the model.
    """
    try:
        with _without_peft_warnings(), names_as_given():
            config = _without_head(saved_config(directory, model), model)
            if config.modules_to_save:
                _name_trained_parts(config, model, directory)
            add_rows(model, saved_token_ids(vars(config)))
            adapted = PeftModel.from_pretrained(model, str(directory), config=config, local_files_only=True)
        forget_originals(adapted)
    except (OSError, ValueError, RuntimeError, TypeError, KeyError, UserWarning) as error:
        # The second line of torch's message names the first weight that does not fit.
        reason = " ".join(" ".join(str(error).splitlines()[:2]).split())[:MOST_REASON]
        raise UserError(f"{directory}: adapter cannot be loaded ({reason}); delete it and run `dvc repro`") from None
    own = ((name, one) for name, one in adapted.named_parameters() if f".{ADAPTER}" in name)
    refuse_not_finite(own, of_adapter(directory))
    if not isinstance(model, ScoredModel):  # Which leaves out a language model's head.
        _refuse_unloaded(adapted, directory)
    multiply_by_rows(adapted)
    compute_rows_alone(adapted)
    keep_trainable_on_cpu(adapted)
    _cast_adapters(adapted, weights)
    return adapted


def _refuse_unloaded(model: PeftModel, directory: Path) -> None:
    """Raise UserError if an adapter's file has more values than the model took: PEFT leaves the rest out silently."""
    parameters = {name: one.numel() for name, one in model.named_parameters()}
    # Biases of the base, and an adapted embedding, have the names that they have in the model.
    stored = {name: one for name, one in adapter_tensors(directory).items() if name not in parameters}
    taken = {name.replace(f".{ADAPTER}", ""): size for name, size in parameters.items() if f".{ADAPTER}" in name}
    if sum(math.prod(one.shape) for one in stored.values()) > sum(taken.values()):
        left = next((name for name in stored if name not in taken), next(iter(stored)))
        raise fault(directory / ADAPTER_WEIGHTS, f"has {left}, for which the model has no place", MERGE_FIRST)


def _name_trained_parts(config: LoraConfig, model: PreTrainedModel, directory: Path) -> None:
    """Name the modules of trained parts as training here does; other tools may name a whole tower."""
    tensors = adapter_tensors(directory)
    modules = fully_trained_modules(model, adapted_parts(tensors))
    stored = [name for name in modules if any(one.startswith(f"{PEFT_PREFIX}{name}.") for one in tensors)]
    config.modules_to_save = [*other_copies(vars(config), tensors), *stored] or None


def _without_head(config: LoraConfig, model: PreTrainedModel) -> LoraConfig:
    """The config of an adapter without the language model's head, if the model is a reward model, which has none."""
    if not isinstance(model, ScoredModel) or config.task_type == SCORES:
        return config
    present = {path.rpartition(".")[2] for path, _ in model.named_modules()}
    config.task_type = None  # peft would call functions of a language model.
    config.modules_to_save = [name for name in config.modules_to_save or () if name in present] or None
    if isinstance(rows := config.trainable_token_indices, dict):
        config.trainable_token_indices = {name: ids for name, ids in rows.items() if name in present}
    return config


def take_experts(
    config: PretrainedConfig, directory: Path, tensors: dict[str, torch.Tensor]
) -> dict[str, ExpertAdapter]:
    """Take the experts' adapters out of a saved adapter, by the name of the projection in the base model.

    Args:
        config: of the base.
        directory: of the saved adapter.
        tensors: those of its file; what this returns is removed.
    """
    model = meta_model(config)
    own_config = saved_config(directory, model)
    if not own_config.target_parameters:
        return {}
    with _without_peft_warnings(), names_as_given():
        adapted = get_peft_model(model, own_config, low_cpu_mem_usage=True)
    multiply_by_rows(adapted)
    found = {}
    for path, module in adapted.named_modules():
        if isinstance(module, GroupedAdapter):
            name = f"{path.removeprefix(PEFT_PREFIX).replace('.base_layer', '')}.{module.parameter_name}"
            A, B = (tensors.pop(f"{path}.lora_{side}.weight") for side in "AB")
            found[name] = module.by_expert(A, B, module.scaling[ADAPTER])
    return found


@contextmanager
def _without_peft_warnings() -> Iterator[None]:
    """Ignore warnings of peft: a deprecated property, GPT-2's layout, ranks and exclusions that it does use."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys did not match", RuntimeWarning)
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to False", UserWarning)
        # Of other versions of peft.
        warnings.filterwarnings("ignore", "Unexpected keyword arguments", UserWarning)
        # It would load the rest as it was initialised.
        warnings.filterwarnings("error", "Found missing adapter keys", UserWarning)
        # Excluded are the parts that a language part lacks and the complete model has.
        warnings.filterwarnings("ignore", "You have passed exclude_modules=", UserWarning)
        yield
