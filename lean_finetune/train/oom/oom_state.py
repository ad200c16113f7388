"""Where memory ended, and what was seen at that instant, as plain numbers.

An exception holds the frames it passed, and with them every tensor of the step. What is kept here holds none, so that
the memory is free again once the exception is gone.
"""

import mmap
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lean_finetune.core.address_limit import AddressLimit, address_limit_met
from lean_finetune.core.errors import UserError
from lean_finetune.core.process_status import STATUS, process_status
from lean_finetune.model.quantize import quantisation_tensors
from lean_finetune.plan.batch_plan import MicroBatch
from lean_finetune.step.training_step import Phase
from lean_finetune.train.monitor.memory_counters import make_counters

FORWARD, BACKWARD, CLIP = "forward", "backward", "clip"
HELDOUT, CHECKPOINT, SAVE = "heldout", "checkpoint", "save"
READING = "reading"
"""Between phases: a batch is read or copied to the device, or the step is brought to its end."""
SIZES = {"bytes": 1, "byte": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
RESERVE_BYTES = 8 * 2**20
"""Addresses that are kept, never touched, and given back when memory ends: to say so takes some."""
MOST_SEGMENTS, MOST_BLOCKS = 64, 64
"""In a snapshot: the largest segments, and of each the largest blocks."""


def asked_bytes(message: str) -> int | None:
    """What was asked for when memory ended, where the allocator says it."""
    found = re.search(r"allocate:? ([0-9.]+) ?(bytes?|[KMGT]iB)\b", message)
    return None if found is None else int(float(found[1]) * SIZES[found[2]])


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Memory ended: where, and what was there."""

    message: str
    """What the allocator said, in one line."""
    asked_bytes: int | None
    """What it could not give."""
    phase: str
    """`load`, `reading`, a phase of the step, `heldout`, `checkpoint` or `save`."""
    step: int | None
    """The optimizer step, from 0; None where none was begun."""
    number: int | None
    """The micro-batch in work, from 0; None where none was."""
    micro_batches: int
    """Of that step."""
    rows: int
    padded_tokens: int
    length: int
    """Of that micro-batch: rows, tokens with padding, tokens of each row (or of all, joined)."""
    joined: bool
    held_bytes: int | None
    """Tensors (on a CPU: what the process took since the run began); None where nothing counts it."""
    reserved_bytes: int | None
    by_category: Mapping[str, int]
    """Bytes of weights, gradients and optimizer; what else is held, is the rest."""
    free_bytes: int | None
    """Of the device."""
    total_bytes: int | None
    addresses: AddressLimit | None
    """The process's limit of addresses, where that is what ended; None where memory did."""
    weights_whole: bool
    """No weight has changed since the last step that is in the curves: the run can go on from there."""
    snapshot: Mapping[str, Any]
    """More, for the file: see `snapshot_of`."""

    @property
    def can_be_cut(self) -> bool:
        """Whether smaller micro-batches can help: it was one's own memory, and the step can begin again."""
        return self.phase in (FORWARD, BACKWARD) and self.rows > 1 and self.weights_whole


class OutOfMemory(UserError):
    """Memory ended, and nothing was found to go on with."""

    def __init__(self, message: str, *details: str, weights_whole: bool):
        """Tell it; `weights_whole` says whether the weights are those of the last step that was done."""
        super().__init__(message, *details)
        self.weights_whole = weights_whole


class Whereabouts:
    """What a run is doing. Keeps the model and its optimizer, to see what they hold when memory ends."""

    def __init__(self, device: torch.device, *, updates_in_backward: bool):
        """Begin before the model is loaded: what is held now is not the run's."""
        self._device, self._counters = device, make_counters(device)
        self._updates_in_backward = updates_in_backward
        self._held_before = self._counters.read().held_bytes
        self._reserve: mmap.mmap | None = mmap.mmap(-1, RESERVE_BYTES)
        self.phase_name = READING
        self.step: int | None = None
        self._number: int | None = None
        self._micro_batches: Sequence[MicroBatch] = ()
        self._model: nn.Module | None = None
        self._optimizer: torch.optim.Optimizer | None = None

    def holds(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """The model is loaded."""
        self._model, self._optimizer = model, optimizer

    def begin_step(self, step: int, micro_batches: Sequence[MicroBatch]) -> None:
        """A step begins, or begins again."""
        self.step, self._micro_batches, self._number = step, micro_batches, None
        self.phase_name = READING
        if self._reserve is None:
            self._reserve = mmap.mmap(-1, RESERVE_BYTES)

    def watching(self, phase: Phase) -> Phase:
        """The step's Phase hook that also tells here what runs."""

        @contextmanager
        def watched(name: str) -> Iterator[None]:
            if name == FORWARD:
                self._number = 0 if self._number is None else self._number + 1
            with self.inside(name), phase(name):
                yield

        return watched

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """A named part of the run; where it ends by an exception, that is where the run is."""
        self.phase_name = name
        yield
        self.phase_name = READING

    def failure(self, error: BaseException) -> Failure:
        """What is there now; call while the exception is handled."""
        if self._reserve is not None:
            self._reserve.close()
            self._reserve = None
        held = self._counters.read()
        cuda = self._device.type == "cuda"
        free, total = torch.cuda.mem_get_info(self._device) if cuda else (None, None)
        one = None if self._number is None else self._micro_batches[self._number]
        message = " ".join(f"{type(error).__name__}: {error}".split())
        asked = asked_bytes(message)
        since = None if held.held_bytes is None else held.held_bytes - (self._held_before or 0)
        return Failure(
            message=message,
            asked_bytes=asked,
            phase=self.phase_name,
            step=self.step,
            number=self._number,
            micro_batches=len(self._micro_batches),
            rows=0 if one is None else len(one.rows),
            padded_tokens=0 if one is None else one.padded_tokens,
            length=0 if one is None else one.length,
            joined=one is not None and one.flat,
            held_bytes=since,
            reserved_bytes=held.reserved_bytes if cuda else None,
            by_category=self._by_category(),
            free_bytes=free,
            total_bytes=total,
            addresses=None if cuda else address_limit_met(asked),
            weights_whole=self.phase_name in ((FORWARD,) if self._updates_in_backward else (FORWARD, BACKWARD, CLIP)),
            snapshot=snapshot_of(self._device),
        )

    def _by_category(self) -> dict[str, int]:
        """Bytes that lie on the device, by what holds them."""
        if self._model is None or self._optimizer is None:
            return {}
        parameters = list(self._model.parameters())
        states = [v for state in self._optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
        held = {
            "weights": [*parameters, *self._model.buffers(), *quantisation_tensors(self._model)],
            "gradients": [parameter.grad for parameter in parameters if parameter.grad is not None],
            "optimizer": states,
        }
        return {name: self._bytes_of(tensors) for name, tensors in held.items()}

    def _bytes_of(self, tensors: Iterable[torch.Tensor]) -> int:
        """Bytes of the storages of tensors, each counted once."""
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if self._is_here(t)}
        return sum(storages.values())

    def _is_here(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._device.type


def snapshot_of(device: torch.device) -> dict[str, Any]:
    """Memory in detail, bounded in size: the allocator's largest segments on a GPU, the system's counts on a CPU."""
    if device.type != "cuda":
        return {"process_status": process_status() if STATUS.exists() else None}
    segments = sorted(torch.cuda.memory_snapshot(), key=lambda segment: -segment["total_size"])
    return {
        "segments": [_segment(segment) for segment in segments[:MOST_SEGMENTS]],
        "segments_left_out": max(0, len(segments) - MOST_SEGMENTS),
    }


def _segment(segment: Mapping[str, Any]) -> dict[str, Any]:
    """One segment with its largest blocks."""
    blocks = sorted(segment["blocks"], key=lambda block: -block["size"])
    return {
        "bytes": segment["total_size"],
        "allocated_bytes": segment["allocated_size"],
        "kind": segment["segment_type"],
        "expandable": segment.get("is_expandable", False),
        "blocks": [{"bytes": block["size"], "state": block["state"]} for block in blocks[:MOST_BLOCKS]],
        "blocks_left_out": max(0, len(blocks) - MOST_BLOCKS),
    }
