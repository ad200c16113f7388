"""LoRA adapters of experts: peft's parameters and files, with matmuls of rows in place of its sum of weights.

peft adapts the stacked weight of all experts by `target_parameters`: its forward adds B_e A_e to every expert's weight
and keeps the sum for backward. Here its modules hold the parameters, and the forward of the experts multiplies rows by
A_e, then by B_e. A saved adapter is peft's in every byte that peft reads.

Shape legend: E experts, R rank, K inputs, N outputs.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from peft import LoraConfig
from peft.tuners.lora.layer import ParamWrapper
from peft.utils import transformers_weight_conversion as conversion
from torch import nn

from lean_finetune.model.experts.experts_forward import (
    ADAPTERS,
    TRANSPOSED,
    expert_modules,
    expert_parameters,
    gates,
    is_grouped,
)
from lean_finetune.patches.of_models import EXPERT_ADAPTERS, GIVEN_NAMES


@dataclass(frozen=True, kw_only=True)
class ExpertAdapter:
    """The adapter of a projection of all experts."""

    A_ERK: torch.Tensor
    B_ENR: torch.Tensor
    scale: float

    def change(self, expert: int) -> torch.Tensor:
        """What it adds to the weight of an expert, (N, K) in fp32."""
        return self.scale * (self.B_ENR[expert].float() @ self.A_ERK[expert].float())


class GroupedAdapter(ParamWrapper):
    """peft's wrapper of an experts' parameter; while it runs, the experts' forward knows the adapter."""

    @contextmanager
    def _activate_lora(self, active_adapters: list[str]) -> Iterator[None]:
        experts: Any = self.get_base_layer()
        (name,) = active_adapters
        A, B = (cast(torch.Tensor, layers[name].weight) for layers in (self.lora_A, self.lora_B))
        adapter = self.by_expert(A, B, self.scaling[name])
        before = getattr(experts, ADAPTERS, {})
        setattr(experts, ADAPTERS, {**before, self.parameter_name: adapter})
        try:
            yield
        finally:
            setattr(experts, ADAPTERS, before)

    def by_expert(self, A: torch.Tensor, B: torch.Tensor, scale: float) -> ExpertAdapter:
        """The adapter of every expert, from peft's matrices of all of them: (E × R, K) and (N, R × E).

        Where peft does not know that weights are transposed, it takes inputs for outputs: B has the inputs.
        """
        A_ERK = A.unflatten(0, (self.num_experts, -1))
        B_ENR = B.unflatten(1, (-1, self.num_experts)).permute(2, 0, 1)
        if hasattr(self.get_base_layer(), TRANSPOSED):
            A_ERK, B_ENR = B_ENR.transpose(1, 2), A_ERK.transpose(1, 2)
        return ExpertAdapter(A_ERK=A_ERK, B_ENR=B_ENR, scale=scale)


def multiply_by_rows(model: nn.Module) -> None:
    """Replace the forward of peft's wrappers of experts by ours."""
    for module in model.modules():
        if type(module) is ParamWrapper:
            EXPERT_ADAPTERS.give_class(module, GroupedAdapter)


def target_experts(config: LoraConfig, model: nn.Module, rank: int) -> None:
    """Add the experts of a model to the targets of an adapter, with a rank of their own and the scale of the others."""
    config.target_parameters = sorted(
        {
            f"{path.rpartition('.')[2]}.{name}"
            for path, module in expert_modules(model)
            for name in expert_parameters(module)
        }
    )
    share = (rank / config.r) ** (0.5 if config.use_rslora else 1.0)
    config.rank_pattern = dict.fromkeys(config.target_parameters, rank)
    config.alpha_pattern = dict.fromkeys(config.target_parameters, config.lora_alpha * share)


def linear_targets(model: Any, linear: Mapping[str, nn.Module]) -> list[str]:
    """What `all-linear` names in a mixture of experts: linear layers apart from the head and the routers.

    Where peft takes the name of a layer for that of experts in older files (`gate_proj` in Qwen2-MoE), the layer gets
    no adapter: peft would load it as an adapter of all experts.

    Args:
        model: with experts.
        linear: its linear layers by path, without the head.
    """
    left_out = gates(model)
    names = {target_name(path) for path in linear if path not in left_out}
    return sorted(names - names_of_experts(model))


def target_name(path: str) -> str:
    """What names a layer among peft's targets: the end of its path; in a list of layers the list's name too."""
    *_, parent, name = ("", *path.split("."))
    return f"{parent}.{name}" if name.isdigit() else name


def names_of_experts(model: Any) -> set[str]:
    """Names of layers that peft takes for those of experts in this model's family."""
    family = conversion._MODEL_TO_CONVERSION_PATTERN.get(model.config.model_type, "")
    return set(conversion._MOE_TARGET_MODULE_MAPPING.get(family, ()))


def names_as_given() -> AbstractContextManager[None]:
    """A context in which peft adapts the layers that are named, also where it takes their name for that of experts."""
    return GIVEN_NAMES.during(lambda config, *args, **kwargs: config)


def trained_in_experts(model: nn.Module) -> int:
    """Trained values of experts and of their adapters."""
    parts = (module for module in model.modules() if is_grouped(module) or isinstance(module, GroupedAdapter))
    trained = {id(p): p.numel() for part in parts for p in part.parameters() if p.requires_grad}
    return sum(trained.values())
