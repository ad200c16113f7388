"""Merge adapters into the weights of experts, one expert at a time, as the model's files store them.

Shape legend: E experts, R rank, K inputs, N outputs.
"""

from collections import defaultdict
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import torch
from transformers import PreTrainedModel

from lean_finetune.config.train_schema import BaseWeights
from lean_finetune.model.experts.expert_adapters import ExpertAdapter
from lean_finetune.model.experts.experts_forward import is_transposed
from lean_finetune.model.merge.stored_experts import expert_parts, projections
from lean_finetune.model.quantize import as_trained, quantisation


class MergedExperts:
    """The tensors of a model's files that have weights of experts, with their rounding in training and adapters."""

    def __init__(
        self,
        stored: Mapping[str, Any],
        model: PreTrainedModel,
        weights: BaseWeights,
        adapters: Mapping[str, ExpertAdapter],
    ):
        """Find them; nothing is read yet.

        Args:
            stored: the tensors of the base model's files.
            model: on the meta device.
            weights: number format of the base in training.
            adapters: of the experts' projections, by name.
        """
        self._stored, self._spec, self._adapters = stored, weights, adapters
        self._packed = quantisation(weights) is not None
        self._modules = projections(model)
        self._parts = expert_parts(self._stored, model)
        self._sources: dict[tuple[str, int | None], list[str]] = defaultdict(list)
        for key, part in sorted(self._parts.items(), key=lambda item: item[1].part):
            self._sources[part.parameter, part.expert].append(key)
        self._last: tuple[tuple[str, int], torch.Tensor] | None = None

    @property
    def missing(self) -> list[str]:
        """Projections that the files do not have in full, in a form that is known here."""
        found: dict[str, Fraction] = defaultdict(Fraction)
        for part in self._parts.values():
            whole = part.parts * (1 if part.expert is None else self._modules[part.parameter].num_experts)
            found[part.parameter] += Fraction(1, whole)
        return sorted(name for name in self._modules if found[name] != 1)

    def __contains__(self, key: str) -> bool:
        """Whether a tensor of a file changes by merging."""
        part = self._parts.get(key)
        return part is not None and (self._packed or part.parameter in self._adapters)

    def merged(self, key: str) -> torch.Tensor:
        """The tensor for the merged file."""
        part, stored = self._parts[key], self._stored[key]
        if part.expert is None:
            merged = torch.empty(stored.shape, dtype=stored.dtype)
            transposed = stored.shape != self._shape(part.parameter)
            for expert in range(len(merged)):
                weight = stored.rows(expert, 1).read()[0]
                weight = self._with_adapter(part.parameter, expert, weight.t().contiguous() if transposed else weight)
                merged[expert] = weight.t() if transposed else weight
            return merged
        place = (part.parameter, part.expert)
        if self._last is None or self._last[0] != place:
            self._last = None
            sources = [self._stored[source].read() for source in self._sources[place]]
            self._last = place, self._with_adapter(*place, torch.cat(sources))
        weight = self._last[1]
        if part.parts == 1:
            self._last = None
        return weight.chunk(part.parts)[part.part].to(stored.dtype)

    def _shape(self, parameter: str) -> tuple[int, ...]:
        """The shape of a projection of all experts in the model."""
        return tuple(getattr(self._modules[parameter], parameter.rpartition(".")[2]).shape)

    def _with_adapter(self, parameter: str, expert: int, stored: torch.Tensor) -> torch.Tensor:
        """The weight of one expert, fp32, from its values in the files."""
        weight = as_trained(stored, self._spec, self._packed)
        if (adapter := self._adapters.get(parameter)) is not None:
            change_NK = adapter.change(expert)
            weight += change_NK.t() if is_transposed(self._modules[parameter]) else change_NK
        return weight
