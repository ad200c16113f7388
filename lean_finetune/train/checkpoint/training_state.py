"""Training state as named tensors and plain values: collect it for a checkpoint, and restore it exactly.

Frozen weights are not part of it: they are loaded again. Optimizer state is copied into the state that
`build_optimizer` creates, each tensor in its own type: PyTorch's `load_state_dict` would cast it to the weights' type.

Tensors are named after parameters. Sharded tensors are stored as ranges of rows, which any other number of processes
can restore. A process reads its own rows only.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from lean_finetune.core.errors import UserError
from lean_finetune.step.parallel_model import ParallelModel, ShardSlice
from lean_finetune.step.update.loss_scaler import LossScaler
from lean_finetune.train.checkpoint.checkpoint_files import CheckpointTensor
from lean_finetune.train.monitor.measured_peak import Meter
from lean_finetune.train.monitor.memory_monitor import MemoryMonitor


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """Return random states (uint8) by device type: the host's, and the GPU's if `device` is one."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_state(states: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Restore what `random_state` returned."""
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


@contextmanager
def restored_after_fault(device: torch.device) -> Iterator[None]:
    """Restore the random states if the block raises: a checkpoint has those of the last finished step."""
    states = random_state(device)
    try:
        yield
    except BaseException:  # A stop signal too.
        set_random_state(states, device)
        raise


READ_BYTES = 256 * 2**20
"""Maximum bytes read at once while a checkpoint is restored."""
WEIGHTS = "weights/"
"""Prefix of the names of trained weights."""
RANDOM = "random/"
"""Prefix of the names of random states."""


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """A run between two optimizer steps."""

    parallel: ParallelModel
    optimizer: torch.optim.Optimizer
    scaler: LossScaler
    meter: Meter
    monitor: MemoryMonitor
    curves: list[dict[str, Any]]
    """One row for each finished step."""
    device: torch.device
    sharding: str = "none"
    """How weights are sharded, `sharding_modes.division`."""

    @property
    def model(self) -> nn.Module:
        """The trained model, or this process's shard."""
        return self.parallel.model

    @property
    def step(self) -> int:
        """Index of the next optimizer step."""
        return len(self.curves)


class LocalTensor(NamedTuple):
    """A tensor of this process: a full tensor or a range of its rows."""

    tensor: torch.Tensor
    rows: ShardSlice

    @property
    def is_range(self) -> bool:
        """Whether the full tensor has more rows."""
        return tuple(self.tensor.shape) != self.rows.full_shape


def layout_of(size: int, sharding: str) -> dict[str, Any]:
    """Describe how GPUs share a run; a checkpoint with another layout is resumed, but its memory figures are not."""
    return {"gpus": size, "sharding": sharding}


def local_tensors(run: TrainingRun) -> dict[str, LocalTensor]:
    """Return this process's trained weights, optimizer tensors and random states by name."""
    trained, pieces = run.parallel.trained_parameters(), run.parallel.slices()
    by_name = {name: piece for (name, _), piece in zip(trained, pieces, strict=True)}
    found = {}
    for name, parameter in trained:
        found[f"{WEIGHTS}{name}{by_name[name].part}"] = LocalTensor(parameter.detach(), by_name[name])
    shapes = {name: parameter.shape for name, parameter in trained}
    for prefix, name, state in _optimizer_states(run):
        piece = by_name[name]
        for key, value in state.items():
            if not isinstance(value, torch.Tensor):
                continue
            rows = shapes[name][0] if shapes[name] else 0
            if value.shape == shapes[name]:
                found[f"{prefix}/{name}{piece.part}/{key}"] = LocalTensor(value, piece)
            else:  # A scalar is the same for all shards; blocks and sums belong to one shard.
                sharded = shapes[name] != piece.full_shape and value.ndim
                suffix = f"[{piece.first_row}:{piece.first_row + rows}]" if sharded else ""
                found[f"{prefix}/{name}{piece.part}/{key}{suffix}"] = _complete(value, saved_here=piece.saved_here)
    for kind, random in random_state(run.device).items():
        found[f"{RANDOM}{run.parallel.rank}/{kind}"] = _complete(random, saved_here=True)
    return found


def tensors_to_store(local: Mapping[str, LocalTensor]) -> dict[str, torch.Tensor]:
    """Return the tensors that this process writes."""
    saved = {name: one for name, one in local.items() if one.rows.saved_here}
    return {name: one.tensor for name, one in saved.items() if one.tensor.numel() or not one.is_range}


def row_ranges(local: Mapping[str, LocalTensor]) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Return first row and full shape of the tensors that are row ranges."""
    return {name: (one.rows.first_row, one.rows.full_shape) for name, one in local.items() if one.is_range}


def plain_values(run: TrainingRun) -> dict[str, Any]:
    """Return the rest of the state, as JSON values."""
    return {
        "step": run.step,
        "layout": layout_of(run.parallel.size, run.sharding),
        "curves": run.curves if run.parallel.rank == 0 else [],
        "meter": run.meter.state(),
        "memory_by_phase": run.monitor.by_phase(),
        "scaler": {key: getattr(run.scaler, key) for key in run.scaler.fields},
        "optimizer": {f"{prefix}/{name}": _numbers(name, state) for prefix, name, state in _optimizer_states(run)},
    }


@torch.no_grad()
def restore_state(
    run: TrainingRun, stored: Mapping[str, CheckpointTensor], values: Sequence[Mapping[str, Any]]
) -> None:
    """Restore the state that `local_tensors` and `plain_values` returned.

    Args:
        run: just loaded, with no curves.
        stored: the checkpoint's tensors, not read yet.
        values: `plain_values` of each process that wrote the checkpoint.

    Raises:
        UserError: optimizer state of single shards does not fit this number of GPUs.
        RuntimeError: the checkpoint is of another run, though its fingerprint is equal.
    """
    local = local_tensors(run)
    random = {name: local.pop(name) for name in list(local) if name.startswith(RANDOM)}
    first = values[0]
    _check_names(run, local, stored, first["layout"])
    for name, one in local.items():
        tensor = stored[name]
        if (tensor.dtype, tensor.shape) != (one.tensor.dtype, one.rows.full_shape):
            raise RuntimeError(f"a checkpoint has {name} as {tensor.dtype} {tensor.shape}")
        _read_into(one, tensor)
    if len(values) == run.parallel.size:
        set_random_state({name.rpartition("/")[2]: stored[name].read() for name in random}, run.device)
    else:
        # There is not one state for each of these processes.
        _reseed(run, stored)
    numbers = {name: found for each in values for name, found in each["optimizer"].items()}
    for prefix, name, state in _optimizer_states(run):
        state.update(numbers[f"{prefix}/{name}"])
    for key in run.scaler.fields:
        setattr(run.scaler, key, first["scaler"][key])
    if first["layout"] == layout_of(run.parallel.size, run.sharding):
        run.meter.restore(values[run.parallel.rank]["meter"])
        run.monitor.restore(values[run.parallel.rank]["memory_by_phase"])
    run.curves.extend(first["curves"])


@torch.no_grad()
def restore_weights(run: TrainingRun, stored: Mapping[str, CheckpointTensor]) -> None:
    """Restore the trained weights alone, of another step of the same run."""
    for name, one in local_tensors(run).items():
        if name.startswith(WEIGHTS):
            _read_into(one, stored[name])


def _read_into(one: LocalTensor, stored: CheckpointTensor) -> None:
    """Read this process's rows some at a time: tensors may be files that are larger than memory."""
    if not one.tensor.ndim:
        one.tensor.copy_(stored.read())
        return
    rows = max(1, READ_BYTES * len(one.tensor) // max(1, one.tensor.nbytes))
    for start in range(0, len(one.tensor), rows):
        part = one.tensor[start : start + rows]
        part.copy_(stored.read_rows(one.rows.first_row + start, len(part)))


def _check_names(
    run: TrainingRun,
    local: Mapping[str, LocalTensor],
    stored: Mapping[str, CheckpointTensor],
    layout: Mapping[str, Any],
) -> None:
    """Compare the tensor names of the checkpoint with those of the run."""
    names = {name for name in stored if not name.startswith(RANDOM)}
    missing = sorted(local.keys() - names)
    if missing and any("[" in name for name in {*missing, *names}):
        raise UserError(
            f"hardware.num_gpus: a checkpoint of this train.optimizer ({type(run.optimizer).__name__}) under "
            f"train.sharding={layout['sharding']} can be resumed on the same number of GPUs only, because its state "
            f"has blocks or sums of each GPU's shard; got {run.parallel.size} for {layout['gpus']}; use the same "
            "number, or delete the run's directory below scratch/train"
        )
    weights = {name for name in names if name.startswith(WEIGHTS)}
    if (
        missing
        or _without_parts(weights) != _without_parts(f"{WEIGHTS}{name}" for name in run.parallel.trained_shapes())
        or (run.parallel.size == 1 and names != local.keys())
    ):
        raise RuntimeError("a checkpoint has other tensors than its run")


def _without_parts(names: Iterable[str]) -> set[str]:
    """Names of the parameters that are sharded across processes (`ShardSlice.part`)."""
    return {name.partition("@")[0] for name in names}


def _reseed(run: TrainingRun, stored: Mapping[str, CheckpointTensor]) -> None:
    """Seed each of another number of processes from the first process's random state."""
    state = stored[f"{RANDOM}0/cpu"].read().numpy().tobytes()
    digest = hashlib.sha256(state + str(run.parallel.seed_rank).encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "big"))


def _complete(tensor: torch.Tensor, *, saved_here: bool) -> LocalTensor:
    """A tensor of which every process has all rows."""
    return LocalTensor(tensor, ShardSlice(first_row=0, full_shape=tuple(tensor.shape), saved_here=saved_here))


def _optimizer_states(run: TrainingRun) -> Iterator[tuple[str, str, dict]]:
    """Yield optimizer, parameter name and state of every tensor that this process updates."""
    names = {id(parameter): name for name, parameter in run.parallel.trained_parameters()}
    updated = [names[id(parameter)] for group in run.optimizer.param_groups for parameter in group["params"]]
    yield from _states_of(run.optimizer, updated, "optimizer")


def _states_of(optimizer: torch.optim.Optimizer, names: list[str], prefix: str) -> Iterator[tuple[str, str, dict]]:
    """Yield the states of an optimizer and of its inner optimizers, which update copies in the same order."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not optimizer.state.keys() <= set(parameters):
        raise RuntimeError(f"{type(optimizer).__name__} has state of tensors that it does not update")
    for name, parameter in zip(names, parameters, strict=True):
        if parameter in optimizer.state:
            yield prefix, name, optimizer.state[parameter]
    for attribute, value in vars(optimizer).items():
        if isinstance(value, torch.optim.Optimizer):
            yield from _states_of(value, names, f"{prefix}.{attribute}")


def _numbers(name: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain values of an optimizer state."""
    numbers = {key: value for key, value in state.items() if not isinstance(value, torch.Tensor)}
    for key, value in numbers.items():
        if not isinstance(value, int | float | None):
            raise RuntimeError(f"{name}/{key} is a {type(value).__name__}, which a checkpoint cannot store")
    return numbers
