"""The layers of a model that get adapters (train.lora.targets)."""

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lean_finetune.config.field_types import ALL_LINEAR
from lean_finetune.config.train_schema import Train
from lean_finetune.core.errors import UserError
from lean_finetune.model.experts.expert_adapters import linear_targets, names_of_experts, target_name
from lean_finetune.model.experts.experts_forward import gates, has_experts

READ_DIRECTLY = {
    **dict.fromkeys(("falcon_h1", "mamba2", "nemotron_h"), {"out_proj"}),
    **dict.fromkeys(("falcon_mamba", "mamba"), {"dt_proj", "out_proj"}),
    "gemma3n_text": {"correction_coefs"},
    "jamba": {"dt_proj"},
}
"""Layers whose weight a family's code reads without calling the layer, so that an adapter would have no effect."""


def adapts_by_name(model: PreTrainedModel) -> bool:
    """Whether `all-linear` must be expanded to names, because peft's would include layers that get no adapter."""
    return has_experts(model) or bool(gates(model)) or bool(_read_directly(model))


def _read_directly(model: PreTrainedModel) -> set[str]:
    """Names of the layers of a model whose weight its code reads without calling the layer."""
    return READ_DIRECTLY.get(model.config.get_text_config().model_type, set())


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
        raise UserError(
            f"train.lora.targets: must name linear layers of the model; got {wrong}; known: {known}, or {ALL_LINEAR}"
            f"{experts}"
        )


def linear_names(model: PreTrainedModel) -> set[str]:
    """The last name parts of all linear layers, except a head that shares the embedding's weight."""
    shared = model.get_input_embeddings().weight
    linear = (pair for pair in model.named_modules() if isinstance(pair[1], (nn.Linear, Conv1D)))
    return {name.rpartition(".")[2] for name, module in linear if module.weight is not shared}
