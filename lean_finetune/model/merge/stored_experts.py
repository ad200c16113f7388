"""Where a model's files have the weights of experts: stacked, as transformers has them, or a tensor for each expert."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose, WeightConverter

from lean_finetune.model.experts.experts_forward import expert_modules, expert_parameters
from lean_finetune.model.language_part import conversions_in_model

STACKED_WHILE_LOADING = ([MergeModulelist], [MergeModulelist, Concatenate])
"""What transformers does with the tensors of one expert each: stack them, and join gate and up along their outputs."""


@dataclass(frozen=True, kw_only=True)
class ExpertPart:
    """What a tensor of a file is of a projection of all experts."""

    parameter: str
    """The projection's name in the model."""
    expert: int | None
    """The expert whose weight it is; None if it has those of all experts."""
    part: int = 0
    """Which part of the expert's outputs."""
    parts: int = 1
    """Number of tensors that an expert's outputs are divided among."""


def projections(model: PreTrainedModel) -> dict[str, Any]:
    """The projections of all experts by name, with their modules."""
    return {f"{path}.{name}": module for path, module in expert_modules(model) for name in expert_parameters(module)}


def stored_by_expert(config: PretrainedConfig) -> bool:
    """Whether a family's files have a tensor for each expert, which transformers stacks while loading."""
    conversions = get_checkpoint_conversion_mapping(config.get_text_config().model_type) or ()
    operations = (operation for one in conversions for operation in getattr(one, "operations", ()))
    return any(isinstance(operation, MergeModulelist) for operation in operations)


def expert_parts(keys: Iterable[str], model: PreTrainedModel) -> Mapping[str, ExpertPart]:
    """The tensors of a model's files that are weights of experts, by their names in the files.

    Those that transformers converts in another way are left out.
    """
    known = projections(model)
    found = {key: _part_of(key, *renamed) for key, renamed in conversions_in_model(model, keys).items()}
    return {key: part for key, part in found.items() if part is not None and part.parameter in known}


def _part_of(key: str, name: str, pattern: str | None, converter: WeightConverter | None) -> ExpertPart | None:
    """What a tensor of a file is, if it is a weight of experts; None if it is converted in another way."""
    if converter is None or _transposes_if_needed(converter):
        return ExpertPart(parameter=name, expert=None)
    expert = re.search(r"\.experts\.(\d+)\.", key)
    if [type(operation) for operation in converter.operations] not in STACKED_WHILE_LOADING or expert is None:
        return None
    part, parts = converter.source_patterns.index(str(pattern)), len(converter.source_patterns)
    return ExpertPart(parameter=name, expert=int(expert[1]), part=part, parts=parts)


def _transposes_if_needed(converter: WeightConverter) -> bool:
    """Whether transformers transposes the weights of experts whose shape is another than the model's (Qwen3-VL-MoE)."""
    (first, *more) = converter.operations
    return not more and isinstance(first, Transpose) and first.check_dims and {first.dim0, first.dim1} == {1, 2}
