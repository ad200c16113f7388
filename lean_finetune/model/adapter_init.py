"""Start LoRA adapters from the weights they adapt (train.lora.init): PiSSA and LoftQ.

To add a start, write a function like `pissa`, name it in `START_FUNCTIONS`, and describe it in `config.adapter_starts`.

Shape legend: a weight is N × K; adapters of rank R are A (R × K) and B (N × R), and add scale × B A to the weight.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from transformers.pytorch_utils import Conv1D

from lean_finetune.config.adapter_starts import ADAPTER_STARTS
from lean_finetune.config.schema import Train
from lean_finetune.core import progress
from lean_finetune.core.errors import UserError
from lean_finetune.core.optional_bitsandbytes import bnb
from lean_finetune.model.files.quantized_checkpoint import file_tensors
from lean_finetune.model.files.safetensors_files import FileTensor
from lean_finetune.model.model_config import read_config
from lean_finetune.pinning.adapter_files import ADAPTER as ADAPTER
from lean_finetune.pinning.adapter_files import PEFT_PREFIX as PEFT_PREFIX

FIRST_ADAPTERS = "adapters_at_start"
"""Attribute of a model whose frozen weights were changed: the adapters that were taken out of them."""
SPARE_DIRECTIONS = 8
"""Directions computed beyond the rank: those at the edge converge with them (Halko et al. 2009, arXiv 0909.4061)."""
POWER_ITERATIONS = 8

Factors = tuple[torch.Tensor, torch.Tensor]
"""A (R × K) and B (N × R)."""


@dataclass(frozen=True, kw_only=True)
class FrozenLayer:
    """A layer whose adapter is about to start."""

    name: str
    """Without peft's prefix."""
    weight: Any
    """As the model stores it: N × K, or packed in 4 or 8 bits."""
    rank: int
    scale: float
    files: Mapping[str, FileTensor]
    """The model's tensors as its files have them."""

    def original(self) -> torch.Tensor:
        """The weight as the model's files have it, fp32.

        Raises:
            UserError: they have none of this name.
        """
        found = self.files.get(f"{self.name}.weight")
        if found is None:
            raise UserError(
                f"train.lora.init: starts from the weights in the model's files; they have no {self.name}.weight; use "
                "default"
            )
        return found.read().to(self.weight.device, torch.float32)


def pissa(layer: FrozenLayer) -> Factors:
    """The largest singular vectors, taken out of the frozen weight (Meng et al. 2024, arXiv 2404.02948)."""
    weight = layer.weight
    A_RK, B_NR = principal_factors(weight.float(), layer.rank, layer.scale)
    weight.copy_(weight.float() - layer.scale * (B_NR @ A_RK))
    return A_RK, B_NR


def loftq(layer: FrozenLayer) -> Factors:
    """The largest singular vectors of what 4 bits lost (one iteration of Li et al. 2023, arXiv 2310.08659)."""
    original = layer.original()
    packed = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state).float()
    return principal_factors(original - packed, layer.rank, layer.scale)


START_FUNCTIONS: dict[str, Callable[[FrozenLayer], Factors]] = {"pissa": pissa, "loftq": loftq}
"""By train.lora.init; peft makes the default start: A random, B zero."""


def refuse_start(model: PeftModel, train: Train) -> None:
    """Refuse a start that an adapted layer cannot have, before its weights are read.

    Raises:
        UserError: a layer is no nn.Linear, or its weight has fewer singular values than train.lora.rank.
    """
    if train.lora.init not in START_FUNCTIONS:
        return
    for name, layer in adapted_layers(model):
        base = layer.get_base_layer()
        if isinstance(base, Conv1D):
            raise UserError(
                f"train.lora.init: {train.lora.init} starts from weights of nn.Linear; got {name}, a Conv1D; use "
                "default"
            )
        if train.lora.rank > (most := min(base.in_features, base.out_features)):
            raise UserError(
                f"train.lora.rank: must be at most {most} with train.lora.init={train.lora.init}, the smaller side of "
                f"{name}; got {train.lora.rank}"
            )


@torch.no_grad()
def start_adapters(model: PeftModel, train: Train, directory: Path, seed: int) -> None:
    """Set every adapter as `train.lora.init` says; the model computes what it did before, up to rounding.

    Raises:
        UserError: the weight of an adapted layer is not in the model's files.
    """
    if train.lora.init not in START_FUNCTIONS:
        return
    torch.manual_seed(seed)
    first: dict[str, Factors] = {}
    files = file_tensors(directory, read_config(directory))
    for name, layer in adapted_layers(model):
        frozen = FrozenLayer(
            name=name,
            weight=layer.get_base_layer().weight,
            rank=train.lora.rank,
            scale=layer.scaling[ADAPTER],
            files=files,
        )
        A_RK, B_NR = START_FUNCTIONS[train.lora.init](frozen)
        if ADAPTER_STARTS[train.lora.init].changes_frozen_weights:
            first[name] = (A_RK.cpu(), B_NR.cpu())
        progress.report()
        layer.lora_A[ADAPTER].weight.copy_(A_RK)
        layer.lora_B[ADAPTER].weight.copy_(B_NR)
    if first:
        setattr(model, FIRST_ADAPTERS, first)


def first_adapters(model: PeftModel) -> Mapping[str, Factors]:
    """The adapters that were taken out of the frozen weights, in host memory by layer; empty if none were."""
    return getattr(model, FIRST_ADAPTERS, {})


def adapted_layers(model: PeftModel) -> Iterator[tuple[str, Any]]:
    """Each adapted layer with its name in the model, without peft's prefix."""
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            yield name.removeprefix(PEFT_PREFIX), module


def principal_factors(matrix_NK: torch.Tensor, rank: int, scale: float) -> Factors:
    """A and B for which scale × B A is the best approximation of this rank, sharing the singular values evenly."""
    wanted = min(rank + SPARE_DIRECTIONS, *matrix_NK.shape)
    U_NQ, S_Q, V_KQ = torch.svd_lowrank(matrix_NK, q=wanted, niter=POWER_ITERATIONS)
    root_R = (S_Q[:rank] / scale).sqrt()
    return root_R[:, None] * V_KQ[:, :rank].T, U_NQ[:, :rank] * root_R


def on_original_weights(
    saved: Mapping[str, torch.Tensor], config: Mapping[str, Any], first: Mapping[str, Factors], scale: float
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Rewrite an adapter for changed weights (PiSSA) as one of twice the rank for the original weights.

    It adds the trained B A and subtracts the first one.

    Args:
        saved: tensors of adapter_model.safetensors.
        config: content of adapter_config.json.
        first: the adapters that were taken out of the weights, see `first_adapters`.
        scale: what B A is multiplied by.
    """
    tensors = dict(saved)
    for name, (A_RK, B_NR) in first.items():
        key = f"{PEFT_PREFIX}{name}.lora_"
        tensors[f"{key}A.weight"] = torch.cat([saved[f"{key}A.weight"].cpu(), A_RK])
        tensors[f"{key}B.weight"] = torch.cat([saved[f"{key}B.weight"].cpu(), -B_NR], dim=1)
    rank = 2 * config["r"]
    alpha = scale * rank
    alpha = int(alpha) if alpha == int(alpha) else alpha
    return tensors, {**config, "r": rank, "lora_alpha": alpha, "use_rslora": False}
