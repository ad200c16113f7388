"""Adapters that start from the weights they adapt: PiSSA and LoftQ.

Shape legend: a weight is N × K; adapters of rank R are A (R × K) and B (N × R), and add scale × B A to the weight.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from transformers.pytorch_utils import Conv1D

from lean_finetune.core import progress
from lean_finetune.core.errors import UserError
from lean_finetune.model.model_spec import ModelSpec
from lean_finetune.model.safetensors_files import StoredTensor, model_tensors

ADAPTER = "default"
"""peft's name of the one adapter."""
START = "adapters_at_start"
"""Attribute of a model whose frozen weights were changed."""
PEFT_PREFIX = "base_model.model."
SPARE_DIRECTIONS = 8
"""Directions looked for beyond the rank: those at the edge converge with them (Halko et al. 2009, arXiv 0909.4061)."""
POWER_ITERATIONS = 8

Start = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""(A, B) at the start, in host memory, by the adapted layer's name."""


@torch.no_grad()
def start_from_weights(model: PeftModel, spec: ModelSpec, directory: Path) -> None:
    """Set the adapters as `train.lora.init` says, and what is frozen so that the whole is what it was.

    pissa: A and B hold the largest singular vectors, and the frozen weight what is left (Meng et al. 2024, arXiv
    2404.02948); the adapters of the start are kept, see `changed_start`. loftq: A and B hold those of what 4 bits lost,
    and nothing else changes (one iteration of Li et al. 2023, arXiv 2310.08659).

    Raises:
        UserError: an adapted layer's weight is not in the model's files.
    """
    torch.manual_seed(spec.seed)
    start: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    stored = model_tensors(directory)
    for name, layer in adapted_layers(model):
        scale, weight = layer.scaling[ADAPTER], layer.get_base_layer().weight
        if isinstance(layer.get_base_layer(), Conv1D):
            raise UserError(
                f"train.lora.init: {spec.lora_init} starts from weights of nn.Linear; got {name}, a Conv1D; use default"
            )
        if spec.lora_init == "pissa":
            A_RK, B_NR = _principal(weight.float(), spec.lora_rank, scale)
            weight.copy_(weight.float() - scale * (B_NR @ A_RK))
            start[name] = (A_RK.cpu(), B_NR.cpu())
        else:
            original = _original(stored, name).to(weight.device, torch.float32)
            packed = bnb.functional.dequantize_4bit(weight.data, weight.quant_state).float()
            A_RK, B_NR = _principal(original - packed, spec.lora_rank, scale)
        progress.made()
        layer.lora_A[ADAPTER].weight.copy_(A_RK)
        layer.lora_B[ADAPTER].weight.copy_(B_NR)
    if start:
        setattr(model, START, start)


def changed_start(model: PeftModel) -> Start:
    """The adapters with which the frozen weights were changed; empty where they are as the files hold them."""
    return getattr(model, START, {})


def adapted_layers(model: PeftModel) -> Iterator[tuple[str, Any]]:
    """Each adapted layer with its name in the model, without peft's prefix."""
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            yield name.removeprefix(PEFT_PREFIX), module


def _original(stored: Mapping[str, StoredTensor], layer: str) -> torch.Tensor:
    """The weight of a layer as the model's files hold it."""
    found = stored.get(f"{layer}.weight")
    if found is None:
        raise UserError(
            f"train.lora.init: loftq reads the weights as the files hold them; they have no {layer}.weight; use default"
        )
    return found.read()


def _principal(matrix_NK: torch.Tensor, rank: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B for which scale × B A is the best approximation of this rank, sharing the singular values evenly."""
    most = min(matrix_NK.shape)
    if rank > most:
        raise UserError(f"train.lora.rank: must be at most {most}, the smaller side of an adapted weight; got {rank}")
    wanted = min(rank + SPARE_DIRECTIONS, most)
    U_NQ, S_Q, V_KQ = torch.svd_lowrank(matrix_NK, q=wanted, niter=POWER_ITERATIONS)
    root_R = (S_Q[:rank] / scale).sqrt()
    return root_R[:, None] * V_KQ[:, :rank].T, U_NQ[:, :rank] * root_R


def on_original_weights(
    saved: Mapping[str, torch.Tensor], config: Mapping[str, Any], start: Start, scale: float
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """A PiSSA adapter as a plain one of twice the rank on the weights as they were: what was added less the start.

    Args:
        saved: tensors of adapter_model.safetensors.
        config: content of adapter_config.json.
        start: what `start_from_weights` returned.
        scale: what B A is multiplied by.
    """
    tensors = dict(saved)
    for name, (A_RK, B_NR) in start.items():
        key = f"{PEFT_PREFIX}{name}.lora_"
        tensors[f"{key}A.weight"] = torch.cat([saved[f"{key}A.weight"].cpu(), A_RK])
        tensors[f"{key}B.weight"] = torch.cat([saved[f"{key}B.weight"].cpu(), -B_NR], dim=1)
    rank = 2 * config["r"]
    alpha = scale * rank
    whole = int(alpha) if alpha == int(alpha) else alpha
    return tensors, {**config, "r": rank, "lora_alpha": whole, "use_rslora": False}
