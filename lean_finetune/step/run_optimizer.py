"""Build the optimizer of a run: parameter groups, state before the first step, learning-rate schedule."""

import math
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from cuda_memory.units import MIB
from lean_finetune.config.field_types import OffloadState, OptimizerName
from lean_finetune.config.optimizers import OPTIMIZERS
from lean_finetune.step.offload.disk_weights import DiskMasterWeights, DiskPlace
from lean_finetune.step.offload.master_weights import HostContext, HostTransfer, MasterWeights
from lean_finetune.step.optimizers import make_state

if TYPE_CHECKING:
    from lean_finetune.config.schema import Params


@dataclass(frozen=True, kw_only=True)
class OptimSpec:
    """The settings that decide the optimizer's state and updates."""

    name: OptimizerName
    lr: float
    weight_decay: float
    schedule: Literal["cosine", "constant"]
    warmup_fraction: float
    master_weights: bool = False
    """Update fp32 copies of 16-bit weights."""
    offload: OffloadState = "none"
    """Whether state and update are on the host; with `parameters`, trained parameters are there already."""
    disk: DiskPlace | None = None
    """With offload: the disk for master weights and state; None = host memory."""

    @classmethod
    def from_params(cls, params: "Params", lr: float, scratch: Path) -> "OptimSpec":
        """Read the `train` section; `lr` is what train.lr means, a file of state is in `scratch`."""
        train = params.train
        place = DiskPlace(directory=scratch, buffer_bytes=params.run.offload_buffer_mib * MIB)
        return cls(
            name=train.optimizer,
            lr=lr,
            weight_decay=float(train.weight_decay),
            schedule=train.schedule,
            warmup_fraction=train.warmup_fraction,
            master_weights=train.master_weights,
            offload=train.offload,
            disk=place if train.offload_to == "disk" else None,
        )


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that receive gradients, each once, in the model's order."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def build_optimizer(model: nn.Module, spec: OptimSpec, on_host: HostContext = nullcontext) -> torch.optim.Optimizer:
    """Build the optimizer over the trained parameters; vectors (norms, biases) are not decayed.

    Its state is made here and not in the first step, so that a run that does not fit fails at once. `on_host` is opened
    around allocations on the host.
    """
    trained = trained_parameters(model)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": spec.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    entry = OPTIMIZERS[spec.name]

    def build(given: list[dict[str, Any]]) -> torch.optim.Optimizer:
        with unset_fake_temporarily():  # bitsandbytes reads the values of its code books.
            optimizer: torch.optim.Optimizer = resolve_name(entry.factory)(given, lr=spec.lr, **entry.options)
        if spec.disk is None:
            make_state(optimizer, entry)
        return optimizer

    dtype = torch.float32 if spec.master_weights else None
    if spec.disk is not None:
        state = partial(make_state, entry=entry)
        return DiskMasterWeights(groups, spec.lr, build, dtype=dtype, make_state=state, entry=entry, place=spec.disk)
    if not spec.master_weights and spec.offload != "optimizer":
        return build(groups)
    link = HostTransfer(trained, dtype, on_host) if spec.offload == "optimizer" else None
    return MasterWeights(groups, spec.lr, build, dtype=dtype, link=link)


def learning_rate(step: int, total_steps: int, spec: OptimSpec) -> float:
    """Learning rate of optimizer step `step` (from 0): linear warm-up, then cosine towards zero, or constant."""
    warmup_steps = round(spec.warmup_fraction * total_steps)
    if step < warmup_steps:
        return spec.lr * (step + 1) / warmup_steps
    if spec.schedule == "constant":
        return spec.lr
    progress = (step - warmup_steps) / (total_steps - warmup_steps)
    return spec.lr * 0.5 * (1.0 + math.cos(math.pi * progress))
