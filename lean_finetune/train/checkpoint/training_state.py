"""What of a run decides how it goes on, as named tensors and plain values; and put back, bit by bit.

Frozen weights are left out: they are loaded again. The state of optimizers is copied into the state that
`build_optimizer` makes, each tensor in its own type: PyTorch's `load_state_dict` would round it to the weights' type.

Names are those of parameters, and of rows that are a part it is told which: what several processes kept is put back
into any other number of them. A process reads the rows that it holds, and no others.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lean_finetune.core.errors import UserError
from lean_finetune.step.loss_scaling import LossScaler
from lean_finetune.step.parallel_model import ParallelModel, ShardSlice
from lean_finetune.train.checkpoint.rng_state import random_state, set_random_state
from lean_finetune.train.checkpoint.stored_tensor import Kept
from lean_finetune.train.monitor.measured_peak import Meter
from lean_finetune.train.monitor.memory_monitor import Monitor

RANDOM = "random/"
"""Before the names of random states."""
SCALER_NUMBERS = ("scale", "good_steps", "skipped_steps")


@dataclass(frozen=True, kw_only=True)
class Running:
    """A run between two optimizer steps."""

    parallel: ParallelModel
    optimizer: torch.optim.Optimizer
    scaler: LossScaler | None
    meter: Meter
    monitor: Monitor
    curves: list[dict[str, Any]]
    """Of every step that is done."""
    device: torch.device
    sharding: str = "none"
    """How weights are divided, ShardSpec.layout."""

    @property
    def model(self) -> nn.Module:
        """What is trained."""
        return self.parallel.model

    @property
    def step(self) -> int:
        """The next optimizer step."""
        return len(self.curves)


@dataclass(frozen=True, kw_only=True)
class Held:
    """A tensor of a run, or the rows of it that this process holds."""

    tensor: torch.Tensor
    first: int
    whole: tuple[int, ...]
    """The first of the rows, and the shape of all."""
    kept_here: bool
    """Whether this process keeps them."""

    @property
    def is_part(self) -> bool:
        """Whether there are more rows."""
        return tuple(self.tensor.shape) != self.whole


def cut_of(size: int, sharding: str) -> dict[str, Any]:
    """How a run is shared; what was kept under another cut is read, but memory is measured anew."""
    return {"gpus": size, "sharding": sharding}


def held_by(run: Running) -> dict[str, Held]:
    """Trained weights, optimizers' tensors and random states by name, as this process holds them."""
    trained, pieces = run.parallel.trained_parameters(), run.parallel.slices()
    by_name = {name: piece for (name, _), piece in zip(trained, pieces, strict=True)}
    held = {f"weights/{name}": _held(parameter.detach(), by_name[name]) for name, parameter in trained}
    shapes = {name: parameter.shape for name, parameter in trained}
    for prefix, name, state in _optimizer_states(run):
        piece = by_name[name]
        for key, value in state.items():
            if not isinstance(value, torch.Tensor):
                continue
            rows = shapes[name][0] if shapes[name] else 0
            if value.shape == shapes[name]:
                held[f"{prefix}/{name}/{key}"] = _held(value, piece)
            else:  # One number is every part's; blocks and sums of a part are that part's alone.
                cut = shapes[name] != piece.full_shape and value.ndim
                part = f"[{piece.first_row}:{piece.first_row + rows}]" if cut else ""
                whole = ShardSlice(first_row=0, full_shape=tuple(value.shape), saved_here=piece.saved_here)
                held[f"{prefix}/{name}/{key}{part}"] = _held(value, whole)
    for kind, random in random_state(run.device).items():
        own = ShardSlice(first_row=0, full_shape=tuple(random.shape), saved_here=True)
        held[f"{RANDOM}{run.parallel.rank}/{kind}"] = _held(random, own)
    return held


def tensors_of(held: Mapping[str, Held]) -> dict[str, torch.Tensor]:
    """What this process keeps."""
    return {name: one.tensor for name, one in held.items() if one.kept_here and (one.tensor.numel() or not one.is_part)}


def pieces_of(held: Mapping[str, Held]) -> dict[str, tuple[int, tuple[int, ...]]]:
    """The first row and the whole shape of tensors that are rows of larger ones."""
    return {name: (one.first, one.whole) for name, one in held.items() if one.is_part}


def values_of(run: Running) -> dict[str, Any]:
    """All else, for JSON."""
    scaler = run.scaler
    return {
        "step": run.step,
        "cut": cut_of(run.parallel.size, run.sharding),
        "curves": run.curves if run.parallel.rank == 0 else [],
        "meter": run.meter.state(),
        "memory_by_phase": run.monitor.by_phase(),
        "scaler": None if scaler is None else {key: getattr(scaler, key) for key in SCALER_NUMBERS},
        "optimizer": {f"{prefix}/{name}": _numbers(name, state) for prefix, name, state in _optimizer_states(run)},
    }


@torch.no_grad()
def put_back(run: Running, stored: Mapping[str, Kept], values: Sequence[Mapping[str, Any]]) -> None:
    """Make a run that was just loaded the one of which `held_by` and `values_of` were taken.

    Args:
        run: at its start, with no curves.
        stored: the tensors that were kept, in their files.
        values: as `values_of` gave them in each process.

    Raises:
        UserError: the optimizer's state was kept in parts that fit no other number of GPUs.
        RuntimeError: what was kept is not of such a run, though its key said so.
    """
    held = held_by(run)
    random = {name: held.pop(name) for name in list(held) if name.startswith(RANDOM)}
    _refuse_others(run, held, stored, values[0]["cut"])
    for name, one in held.items():
        kept = stored[name]
        if (kept.dtype, kept.shape) != (one.tensor.dtype, one.whole):
            raise RuntimeError(f"a checkpoint holds {name} as {kept.dtype} {kept.shape}")
        one.tensor.copy_(kept.read_rows(one.first, len(one.tensor)) if one.is_part else kept.read())
    first = values[0]
    same_cut = first["cut"] == cut_of(run.parallel.size, run.sharding)
    if len(values) == run.parallel.size:
        set_random_state({name.rpartition("/")[2]: stored[name].read() for name in random}, run.device)
    else:
        _redraw(run, stored)
    numbers = {name: found for each in values for name, found in each["optimizer"].items()}
    for prefix, name, state in _optimizer_states(run):
        state.update(numbers[f"{prefix}/{name}"])
    if run.scaler is not None:
        for key in SCALER_NUMBERS:
            setattr(run.scaler, key, first["scaler"][key])
    if same_cut:
        run.meter.restore(values[run.parallel.rank]["meter"])
        run.monitor.restore(values[run.parallel.rank]["memory_by_phase"])
    run.curves.extend(first["curves"])


def _refuse_others(run: Running, held: Mapping[str, Held], stored: Mapping[str, Kept], cut: Mapping[str, Any]) -> None:
    """Hold what was kept to what is there."""
    kept = {name for name in stored if not name.startswith(RANDOM)}
    missing = sorted(held.keys() - kept)
    if missing and any("[" in name for name in {*missing, *kept}):
        raise UserError(
            f"hardware.num_gpus: a checkpoint of this train.optimizer ({type(run.optimizer).__name__}) under "
            f"train.sharding={cut['sharding']} fits as many GPUs as wrote it alone: its state has blocks or sums of "
            f"each GPU's part; got {run.parallel.size} for {cut['gpus']}; go on with those, or remove what "
            "this run keeps in scratch/train"
        )
    weights = {name for name in kept if name.startswith("weights/")}
    if (
        missing
        or weights != {name for name in held if name.startswith("weights/")}
        or (run.parallel.size == 1 and kept != held.keys())
    ):
        raise RuntimeError("a checkpoint holds other tensors than the run that it was kept for")


def _redraw(run: Running, stored: Mapping[str, Kept]) -> None:
    """Draw from here on what follows from the first process's state: each of another number of GPUs its own."""
    state = stored[f"{RANDOM}0/cpu"].read().numpy().tobytes()
    digest = hashlib.sha256(state + str(run.parallel.rank).encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "big"))


def _held(tensor: torch.Tensor, piece: ShardSlice) -> Held:
    """A tensor as a piece."""
    return Held(tensor=tensor, first=piece.first_row, whole=piece.full_shape, kept_here=piece.saved_here)


def _optimizer_states(run: Running) -> Iterator[tuple[str, str, dict]]:
    """The state of every tensor that this process updates: of which optimizer, of which parameter, and the state."""
    names = {id(parameter): name for name, parameter in run.parallel.trained_parameters()}
    updated = [names[id(parameter)] for group in run.optimizer.param_groups for parameter in group["params"]]
    yield from _states_of(run.optimizer, updated, "optimizer")


def _states_of(optimizer: torch.optim.Optimizer, names: list[str], prefix: str) -> Iterator[tuple[str, str, dict]]:
    """Those of an optimizer, and of optimizers that it holds, which update copies in the same order."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not optimizer.state.keys() <= set(parameters):
        raise RuntimeError(f"{type(optimizer).__name__} keeps state of tensors that it does not update")
    for name, parameter in zip(names, parameters, strict=True):
        if parameter in optimizer.state:
            yield prefix, name, optimizer.state[parameter]
    for attribute, value in vars(optimizer).items():
        if isinstance(value, torch.optim.Optimizer):
            yield from _states_of(value, names, f"{prefix}.{attribute}")


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
