"""Build the optimizer of a run: parameter groups, state before the first step, learning-rate schedule."""

import math
from contextlib import nullcontext
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from lean_finetune.config.optimizers import OPTIMIZERS
from lean_finetune.config.train_schema import Train
from lean_finetune.step.offload.disk_weights import DiskMasterWeights, DiskPlace
from lean_finetune.step.offload.master_weights import HostContext, HostTransfer, MasterWeights
from lean_finetune.step.optimizers import make_state


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that receive gradients, each once, in the model's order."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def peak_lr(train: Train) -> float:
    """train.lr, which must not be `auto` any more."""
    assert train.lr != "auto"
    return train.lr


def build_optimizer(
    model: nn.Module, train: Train, *, disk: DiskPlace | None = None, on_host: HostContext = nullcontext
) -> torch.optim.Optimizer:
    """Build the optimizer over the trained parameters; vectors (norms, biases) are not decayed.

    Its state is made here and not in the first step, so that a run that does not fit fails at once.

    Args:
        model: its trained parameters are updated.
        train: with the learning rate itself, not `auto`.
        disk: where offloaded master weights and state are; None = in host memory.
        on_host: opened around allocations on the host.
    """
    lr, trained = peak_lr(train), trained_parameters(model)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    entry = OPTIMIZERS[train.optimizer]

    def build(given: list[dict[str, Any]]) -> torch.optim.Optimizer:
        with unset_fake_temporarily():  # bitsandbytes reads the values of its code books.
            optimizer: torch.optim.Optimizer = resolve_name(entry.factory)(given, lr=lr, **entry.options)
        if disk is None:
            make_state(optimizer, entry)
        return optimizer

    dtype = torch.float32 if train.master_weights else None
    if disk is not None:
        state = partial(make_state, entry=entry)
        return DiskMasterWeights(groups, lr, build, dtype=dtype, make_state=state, entry=entry, place=disk)
    if not train.master_weights and train.offload != "optimizer":
        return build(groups)
    link = HostTransfer(trained, dtype, on_host) if train.offload == "optimizer" else None
    return MasterWeights(groups, lr, build, dtype=dtype, link=link)


def learning_rate(step: int, total_steps: int, train: Train) -> float:
    """Learning rate of optimizer step `step` (from 0): linear warm-up, then cosine towards zero, or constant."""
    lr, warmup_steps = peak_lr(train), round(train.warmup_fraction * total_steps)
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if train.schedule == "constant":
        return lr
    progress = (step - warmup_steps) / (total_steps - warmup_steps)
    return lr * 0.5 * (1.0 + math.cos(math.pi * progress))
