"""The optimizers by name: how each is made, the state it keeps, and how that state is made before the first step."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import bitsandbytes as bnb
import torch
from torch import nn
from transformers.optimization import Adafactor

from lean_finetune.config.field_types import OptimizerName
from lean_finetune.step.master_weights import MasterWeights

# Each optimizer's published constants.
ADAM: Mapping[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8}
LION: Mapping[str, Any] = {"betas": (0.9, 0.99)}
ADEMAMIX: Mapping[str, Any] = {"betas": (0.9, 0.999, 0.9999), "alpha": 5.0, "eps": 1e-8}

PAGED_VALUES = 100_000
"""Tensors with fewer values are not paged (bitsandbytes' get_state_buffer)."""


@dataclass(frozen=True, kw_only=True)
class OptimizerKind:
    """One optimizer: its class, and what it keeps."""

    make: Callable[..., torch.optim.Optimizer]
    """Takes parameter groups, `lr` and the options."""
    options: Mapping[str, Any] = field(default_factory=dict)
    moments: int
    """Values kept for every trained value."""
    moment_bits: int | None
    """Bits of such a value; None = the type of the trained value."""
    factored: bool = False
    """A matrix keeps sums of its rows and columns (fp32) in the place of values."""
    count: Literal["device", "host"] | None = None
    """Where a tensor counting the steps lies, for each parameter; None = the count is no tensor."""
    paged: bool = False
    """On CUDA its large tensors are managed memory, which moves to the host where the device has no room."""


OPTIMIZERS: Mapping[OptimizerName, OptimizerKind] = {
    # Loshchilov & Hutter 2019. Fused updates in place; the foreach form holds further copies of the parameters.
    "adamw": OptimizerKind(
        make=torch.optim.AdamW, options={**ADAM, "fused": True}, moments=2, moment_bits=None, count="device"
    ),
    "adamw_foreach": OptimizerKind(
        make=torch.optim.AdamW, options={**ADAM, "foreach": True}, moments=2, moment_bits=None, count="host"
    ),
    # Dettmers et al. 2021, arXiv 2110.02861.
    "adamw_8bit": OptimizerKind(make=bnb.optim.AdamW8bit, options=ADAM, moments=2, moment_bits=8),
    "paged_adamw_8bit": OptimizerKind(
        make=bnb.optim.PagedAdamW8bit, options=ADAM, moments=2, moment_bits=8, paged=True
    ),
    "paged_adamw_32bit": OptimizerKind(
        make=bnb.optim.PagedAdamW32bit, options=ADAM, moments=2, moment_bits=32, paged=True
    ),
    # Chen et al. 2023, arXiv 2302.06675: one moment; wants a learning rate 3 to 10 times smaller than AdamW's.
    "lion": OptimizerKind(make=bnb.optim.Lion, options=LION, moments=1, moment_bits=32),
    "lion_8bit": OptimizerKind(make=bnb.optim.Lion8bit, options=LION, moments=1, moment_bits=8),
    # Shazeer & Stern 2018, arXiv 1804.04235, at the learning rate given. PyTorch's own form scales that rate by each
    # tensor's size, and waits for the device twice a tensor to do so.
    "adafactor": OptimizerKind(
        make=Adafactor,
        options={"scale_parameter": False, "relative_step": False},
        moments=0,
        moment_bits=None,
        factored=True,
    ),
    # Pagliardini et al. 2024, arXiv 2409.03137: a fast and a slow mean of gradients, and their squares.
    "ademamix_8bit": OptimizerKind(make=bnb.optim.AdEMAMix8bit, options=ADEMAMIX, moments=3, moment_bits=8),
    # Without momentum, so without state; decay inside the gradient is then the decoupled one.
    "sgd": OptimizerKind(make=torch.optim.SGD, options={"momentum": 0.0, "fused": True}, moments=0, moment_bits=None),
}


@torch.no_grad()
def make_state(optimizer: torch.optim.Optimizer, kind: OptimizerKind) -> None:
    """Make the state that the first step would make, as that step would."""
    if isinstance(optimizer, bnb.optim.optimizer.Optimizer8bit):
        _make_bitsandbytes_state(optimizer)
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if kind.factored:
                optimizer.state[parameter] = _factored_state(parameter)
            elif kind.count is not None:
                optimizer.state[parameter] = {
                    "step": _step_count(parameter, kind.count),
                    "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                    "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                }


def _step_count(parameter: nn.Parameter, place: str) -> torch.Tensor:
    """A count of steps as PyTorch makes it: on the host a constant, whose value a trace can follow."""
    if place == "host":
        return torch.tensor(0.0, dtype=torch.float32)
    return torch.zeros((), dtype=torch.float32, device=parameter.device)


def _factored_state(parameter: nn.Parameter) -> dict[str, Any]:
    """Adafactor's sums; `RMS` is the size of the parameter at its last step, which its first step looks at no more."""

    def zeros(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.float32, device=parameter.device)

    shape = tuple(parameter.shape)
    if len(shape) < 2:
        return {"step": 0, "exp_avg_sq": zeros(shape), "RMS": zeros(())}
    rows, columns = zeros(shape[:-1]), zeros(shape[:-2] + shape[-1:])
    return {"step": 0, "exp_avg_sq_row": rows, "exp_avg_sq_col": columns, "RMS": zeros(())}


def _make_bitsandbytes_state(optimizer: Any) -> None:
    """Make moments as bitsandbytes' own first step would."""
    optimizer.check_overrides()
    optimizer.to_gpu()
    optimizer.initialized = True
    with warnings.catch_warnings():
        # Whoever chose a paged optimizer without CUDA is told in our words, see `paging_note`.
        warnings.filterwarnings("ignore", "Paged optimizers are not supported on CPU", UserWarning)
        for group_index, group in enumerate(optimizer.param_groups):
            for parameter_index, parameter in enumerate(group["params"]):
                optimizer.init_state(group, parameter, group_index, parameter_index)


def is_paged(name: OptimizerName, values: int, *, cuda: bool) -> bool:
    """Whether the state of a parameter with so many values is managed memory, which no allocator counts."""
    return cuda and OPTIMIZERS[name].paged and values >= PAGED_VALUES


def device_state(optimizer: torch.optim.Optimizer, name: OptimizerName, *, cuda: bool) -> Iterator[torch.Tensor]:
    """The tensors of its state that the device's allocator holds; `cuda` says what that device is."""
    if isinstance(optimizer, MasterWeights):
        if optimizer.link is not None:
            return
        yield from (state["master"] for state in optimizer.state.values())
        yield from device_state(optimizer.inner, name, cuda=cuda)
        return
    for parameter, state in optimizer.state.items():
        paged = is_paged(name, parameter.numel(), cuda=cuda)
        for key, value in state.items():
            counted_on_host = key == "step" and OPTIMIZERS[name].count == "host"
            if isinstance(value, torch.Tensor) and not (cuda and counted_on_host):
                if not (paged and key in ("state1", "state2")):
                    yield value
    if not cuda:  # bitsandbytes makes both code books on the host, and moves those that are needed.
        yield from getattr(optimizer, "name2qmap", {}).values()


def paging_note(name: OptimizerName, device: torch.device) -> str | None:
    """What to tell whoever asks for paged state where there is no managed memory."""
    if not OPTIMIZERS[name].paged or device.type == "cuda":
        return None
    return f"train.optimizer: {name} pages its state on CUDA only; on {device.type} it is ordinary memory, same numbers"
