"""What of a run decides how it goes on, as named tensors and plain values; and put back, bit by bit.

Frozen weights are left out: they are loaded again. The state of optimizers is copied into the state that
`build_optimizer` makes, each tensor in its own type: PyTorch's `load_state_dict` would round it to the weights' type.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stages.model.tensor_files import StoredTensor
from stages.step.scale import LossScaler
from stages.step.team import Team
from stages.train.measure import Meter
from stages.train.monitor import Monitor
from stages.train.rng import random_state, set_random_state

RANDOM = "random/"
"""Before the names of random states."""
SCALER_NUMBERS = ("scale", "good_steps", "skipped_steps")


@dataclass(frozen=True, kw_only=True)
class Running:
    """A run between two optimizer steps."""

    team: Team
    optimizer: torch.optim.Optimizer
    scaler: LossScaler | None
    meter: Meter
    monitor: Monitor
    curves: list[dict[str, Any]]
    """Of every step that is done."""
    device: torch.device

    @property
    def model(self) -> nn.Module:
        """What is trained."""
        return self.team.model

    @property
    def step(self) -> int:
        """The next optimizer step."""
        return len(self.curves)


def tensors_of(run: Running) -> dict[str, torch.Tensor]:
    """Trained weights, optimizers' tensors and random states by name; one that several share is there once."""
    named = {f"weights/{name}": parameter.detach() for name, parameter in run.team.trained()}
    for name, state in _optimizer_states(run.optimizer):
        named |= {f"{name}/{key}": value for key, value in state.items() if isinstance(value, torch.Tensor)}
    named |= {f"{RANDOM}{name}": state for name, state in random_state(run.device).items()}
    first_name = {id(tensor): name for name, tensor in reversed(named.items())}
    return {name: tensor for name, tensor in named.items() if first_name[id(tensor)] == name}


def values_of(run: Running) -> dict[str, Any]:
    """All else, for JSON."""
    scaler = run.scaler
    return {
        "step": run.step,
        "curves": run.curves,
        "meter": run.meter.state(),
        "memory_by_phase": run.monitor.by_phase(),
        "scaler": None if scaler is None else {key: getattr(scaler, key) for key in SCALER_NUMBERS},
        "optimizer": {name: _numbers(name, state) for name, state in _optimizer_states(run.optimizer)},
    }


@torch.no_grad()
def put_back(run: Running, stored: Mapping[str, StoredTensor], values: Mapping[str, Any]) -> None:
    """Make a run that was just loaded the one of which `tensors_of` and `values_of` were taken.

    Args:
        run: at its start, with no curves.
        stored: the tensors that were kept, in their file.
        values: as `values_of` gave them.

    Raises:
        RuntimeError: what was kept is not of such a run, though its key said so.
    """
    live = tensors_of(run)
    states = dict(_optimizer_states(run.optimizer))
    if live.keys() != stored.keys() or states.keys() != values["optimizer"].keys():
        raise RuntimeError("a checkpoint holds other tensors than the run that it was kept for")
    for name, tensor in live.items():
        kept = stored[name]
        if (kept.dtype, kept.shape) != (tensor.dtype, tuple(tensor.shape)):
            raise RuntimeError(f"a checkpoint holds {name} as {kept.dtype} {kept.shape}")
        tensor.copy_(kept.read())
    set_random_state({name.removeprefix(RANDOM): live[name] for name in live if name.startswith(RANDOM)}, run.device)
    for name, state in states.items():
        state.update(values["optimizer"][name])
    if run.scaler is not None:
        for key in SCALER_NUMBERS:
            setattr(run.scaler, key, values["scaler"][key])
    run.meter.restore(values["meter"])
    run.monitor.restore(values["memory_by_phase"])
    run.curves.extend(values["curves"])


def _optimizer_states(optimizer: torch.optim.Optimizer, prefix: str = "optimizer") -> Iterator[tuple[str, dict]]:
    """The state of every trained tensor by name; that of optimizers which an optimizer holds as well."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not optimizer.state.keys() <= set(parameters):
        raise RuntimeError(f"{type(optimizer).__name__} keeps state of tensors that it does not update")
    for place, parameter in enumerate(parameters):
        if parameter in optimizer.state:
            yield f"{prefix}/{place}", optimizer.state[parameter]
    for name, value in vars(optimizer).items():
        if isinstance(value, torch.optim.Optimizer):
            yield from _optimizer_states(value, f"{prefix}/{name}")


def _numbers(name: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """The plain values of a state.

    Raises:
        RuntimeError: it holds what cannot be kept.
    """
    numbers = {key: value for key, value in state.items() if not isinstance(value, torch.Tensor)}
    for key, value in numbers.items():
        if not isinstance(value, int | float | None):
            raise RuntimeError(f"{name}/{key} is a {type(value).__name__}, which a checkpoint cannot hold")
    return numbers
