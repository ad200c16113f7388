"""Build the optimizer of a run: its class, its state before the first step, its learning rates."""

import math
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from lean_finetune.config.field_types import OptimizerName
from lean_finetune.config.optimizers import OPTIMIZERS, OptimizerEntry
from lean_finetune.config.schema import Train
from lean_finetune.core.optional_bitsandbytes import bnb, require_bitsandbytes
from lean_finetune.step.offload.disk_weights import DiskMasterWeights, DiskPlace
from lean_finetune.step.offload.master_weights import HostContext, HostTransfer, MasterWeights
from lean_finetune.step.parallel_model import named_trained

PAGED_VALUES = 100_000
"""Tensors with fewer values are not paged (bitsandbytes' get_state_buffer)."""


@torch.no_grad()
def make_state(optimizer: torch.optim.Optimizer, entry: OptimizerEntry) -> None:
    """Make the state that the first step would make, as that step would."""
    if isinstance(optimizer, bnb.optim.optimizer.Optimizer8bit):
        _make_bitsandbytes_state(optimizer)
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if entry.factored:
                optimizer.state[parameter] = _factored_state(parameter)
            elif entry.state or entry.step_count:
                optimizer.state[parameter] = _zero_state(parameter, entry)


def _zero_state(parameter: nn.Parameter, entry: OptimizerEntry) -> dict[str, Any]:
    """The state of one parameter as PyTorch's optimizers make it."""
    dtype = parameter.dtype if entry.state_bits is None else torch.float32
    state = {name: torch.zeros_like(parameter, dtype=dtype) for name in entry.state}
    if entry.step_count == "host":  # On the host a constant, whose value a trace can follow.
        state = {"step": torch.tensor(0.0, dtype=torch.float32), **state}
    elif entry.step_count == "device":
        state = {"step": torch.zeros((), dtype=torch.float32, device=parameter.device), **state}
    return state


def _factored_state(parameter: nn.Parameter) -> dict[str, Any]:
    """The sums of Adafactor; its first step no longer reads `RMS`, the size of the parameter at the last step."""

    def zeros(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.float32, device=parameter.device)

    shape = tuple(parameter.shape)
    if len(shape) < 2:
        return {"step": 0, "exp_avg_sq": zeros(shape), "RMS": zeros(())}
    rows, columns = zeros(shape[:-1]), zeros(shape[:-2] + shape[-1:])
    return {"step": 0, "exp_avg_sq_row": rows, "exp_avg_sq_col": columns, "RMS": zeros(())}


def _make_bitsandbytes_state(optimizer: Any) -> None:
    """Make moments as bitsandbytes' own first step would."""
    # bitsandbytes' `step` does these three only while `initialized` is not set.
    optimizer.check_overrides()
    optimizer.to_gpu()
    optimizer.initialized = True
    with warnings.catch_warnings():
        # `paging_note` replaces this warning.
        warnings.filterwarnings("ignore", "Paged optimizers are not supported on CPU", UserWarning)
        for group_index, group in enumerate(optimizer.param_groups):
            for parameter_index, parameter in enumerate(group["params"]):
                optimizer.init_state(group, parameter, group_index, parameter_index)


def is_paged(name: OptimizerName, values: int, *, cuda: bool) -> bool:
    """Whether the state of a parameter with `values` values is managed memory, which no allocator counts."""
    return cuda and OPTIMIZERS[name].paged and values >= PAGED_VALUES


def device_state(optimizer: torch.optim.Optimizer, name: OptimizerName, *, cuda: bool) -> Iterator[torch.Tensor]:
    """The state tensors that the device's allocator counts; `cuda`: that device is a GPU."""
    if isinstance(optimizer, MasterWeights):
        if optimizer.link is not None:  # In host memory. State on disk is not counted here: its runs are not traced.
            return
        yield from (state["master"] for state in optimizer.state.values())
        yield from device_state(optimizer.inner, name, cuda=cuda)
        return
    entry = OPTIMIZERS[name]
    for parameter, state in optimizer.state.items():
        elsewhere = set(entry.state) if is_paged(name, parameter.numel(), cuda=cuda) else set()
        if cuda and entry.step_count == "host":
            elsewhere.add("step")
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and key not in elsewhere:
                yield value
    if not cuda:  # bitsandbytes makes both code books on the host, and moves those that are needed.
        yield from getattr(optimizer, "name2qmap", {}).values()


def paging_note(name: OptimizerName, device: torch.device) -> str | None:
    """What train prints for a paged optimizer on a device without managed memory; else None."""
    if not OPTIMIZERS[name].paged or device.type == "cuda":
        return None
    return f"train.optimizer: {name} pages its state on CUDA only; on {device.type} it is ordinary memory, same numbers"


# Build the optimizer of a run: parameter groups, state before the first step, learning-rate schedule.


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
        disk: the file of offloaded master weights and state; None = on the device, or in host memory (train.offload).
        on_host: opened around allocations on the host.
    """
    lr, trained = peak_lr(train), [parameter for _, parameter in named_trained(model)]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    entry = OPTIMIZERS[train.optimizer]

    if entry.factory.startswith("bitsandbytes."):
        require_bitsandbytes("train.optimizer", train.optimizer, "train.optimizer=adamw")

    def build(given: list[dict[str, Any]]) -> torch.optim.Optimizer:
        with unset_fake_temporarily():  # bitsandbytes reads the values of its code books.
            optimizer: torch.optim.Optimizer = _optimizer_class(entry, train)(given, lr=lr, **entry.options)
        # With a disk, `DiskMasterWeights` makes the state in its file.
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


def _optimizer_class(entry: OptimizerEntry, train: Train) -> Any:
    """The class of an optimizer; of 8-bit AdamW a subclass with another update on a GPU, if kernels are fused."""
    if entry.factory == "bitsandbytes.optim.AdamW8bit" and train.fused_kernels == "auto":
        from lean_finetune.step.adamw_8bit import AdamW8bit

        return AdamW8bit
    return resolve_name(entry.factory)


def learning_rate(step: int, total_steps: int, train: Train) -> float:
    """Learning rate of optimizer step `step` (from 0): linear warm-up, then train.schedule."""
    lr, warmup_steps = peak_lr(train), round(train.warmup_fraction * total_steps)
    if step < warmup_steps:
        # Not from 0: the first step would learn nothing.
        return lr * (step + 1) / warmup_steps
    if train.schedule == "constant":
        return lr
    progress = (step - warmup_steps) / (total_steps - warmup_steps)
    if train.schedule == "linear":
        return lr * (1.0 - progress)
    return lr * 0.5 * (1.0 + math.cos(math.pi * progress))
