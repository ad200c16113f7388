"""Optimizers: parameter groups, state made before the first step, learning-rate schedule."""

import math
from dataclasses import dataclass
from typing import Literal

import bitsandbytes as bnb
import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from stages.params import Params

ADAM_BETAS = (0.9, 0.999)
ADAM_EPS = 1e-8


@dataclass(frozen=True, kw_only=True)
class OptimSpec:
    """What decides the optimizer's state and updates."""

    name: Literal["adamw", "adamw_8bit"]
    lr: float
    weight_decay: float
    schedule: Literal["cosine", "constant"]
    warmup_fraction: float

    @classmethod
    def from_params(cls, params: Params) -> "OptimSpec":
        """Read the `train` section."""
        train = params.train
        return cls(
            name=train.optimizer,
            lr=float(train.lr),
            weight_decay=float(train.weight_decay),
            schedule=train.schedule,
            warmup_fraction=train.warmup_fraction,
        )


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that receive gradients, each once, in the model's order."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def build_optimizer(model: nn.Module, spec: OptimSpec) -> torch.optim.Optimizer:
    """AdamW (Loshchilov & Hutter 2019) over the trained parameters; vectors (norms, biases) are not decayed.

    Its state is made here and not in the first step, so that the first step already holds as much as any later one:
    what does not fit fails at once.
    """
    trained = trained_parameters(model)
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": spec.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if spec.name == "adamw_8bit":
        with unset_fake_temporarily():  # Its constructor reads the values of its code books.
            optimizer = bnb.optim.AdamW8bit(groups, lr=spec.lr, betas=ADAM_BETAS, eps=ADAM_EPS)
        _make_bitsandbytes_state(optimizer)
        return optimizer
    # Fused updates in place; the foreach form would hold another copy of the parameters for a moment.
    adamw = torch.optim.AdamW(groups, lr=spec.lr, betas=ADAM_BETAS, eps=ADAM_EPS, fused=True)
    for parameter in trained:
        adamw.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }
    return adamw


@torch.no_grad()
def _make_bitsandbytes_state(optimizer: bnb.optim.AdamW8bit) -> None:
    """Make the 8-bit moments as bitsandbytes' own first step would."""
    optimizer.check_overrides()
    optimizer.to_gpu()
    optimizer.initialized = True
    for group_index, group in enumerate(optimizer.param_groups):
        for parameter_index, parameter in enumerate(group["params"]):
            optimizer.init_state(group, parameter, group_index, parameter_index)


def learning_rate(step: int, total_steps: int, spec: OptimSpec) -> float:
    """Learning rate of optimizer step `step` (0-based): linear warm-up, then cosine towards zero, or constant."""
    warmup_steps = round(spec.warmup_fraction * total_steps)
    if step < warmup_steps:
        return spec.lr * (step + 1) / warmup_steps
    if spec.schedule == "constant":
        return spec.lr
    progress = (step - warmup_steps) / (total_steps - warmup_steps)
    return spec.lr * 0.5 * (1.0 + math.cos(math.pi * progress))
