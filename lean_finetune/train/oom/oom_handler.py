"""What is known when memory runs out, and steps that are split and tried again."""

import errno
import gc
import mmap
import re
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import psutil
import torch
from torch import nn

from lean_finetune.core.errors import DoesNotFit
from lean_finetune.core.memory_limits import STATUS, process_status
from lean_finetune.model.quantize import quantisation_tensors
from lean_finetune.plan.batch_plan import MicroBatch, Plan
from lean_finetune.step.batches import Batch, TokenPart, load, own_micro_batches
from lean_finetune.step.token_rows import TokenRows
from lean_finetune.step.training_step import Phase
from lean_finetune.train.monitor.memory_monitor import make_counters

MESSAGES = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
)
"""Messages of plain RuntimeErrors: from PyTorch's CPU allocator, and from libraries that allocate themselves."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that the device or the host is out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(message in str(error) for message in MESSAGES)


# The address-space limit of a process (RLIMIT_AS, `ulimit -v`), which can refuse memory that the machine has.


@dataclass(frozen=True, kw_only=True)
class AddressLimit:
    """The limit and its use, in bytes."""

    limit_bytes: int
    used_bytes: int
    """Mapped addresses, with or without physical memory. Libraries and mapped files count."""


def address_limit_met(requested_bytes: int | None) -> AddressLimit | None:
    """The limit of this process if it caused a refused allocation; None otherwise. Only Linux enforces it.

    Linux refuses an allocation only above a limit or above the machine's memory. Memory in use at that time may be free
    now, because the exception has released the step's tensors. `requested_bytes` is None if the request is unknown.
    """
    if sys.platform != "linux":
        return None
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    used = psutil.Process().memory_info().vms
    beyond_machine = requested_bytes is not None and requested_bytes > psutil.virtual_memory().available
    if limit == resource.RLIM_INFINITY or (beyond_machine and used + (requested_bytes or 0) <= limit):
        return None
    return AddressLimit(limit_bytes=limit, used_bytes=used)


# Position of a run and its memory at an out-of-memory error, as plain numbers.
#
# An exception references the frames it passed, and with them every tensor of the step. What is stored here references
# none, so the memory is free again once the exception is gone.

FORWARD, BACKWARD, CLIP = "forward", "backward", "clip"
HELDOUT, CHECKPOINT, SAVE = "heldout", "checkpoint", "save"
READING = "reading"
"""Between phases: a batch is read or copied to the device, or the step ends."""
SIZES = {"bytes": 1, "byte": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
RESERVE_BYTES = 8 * 2**20
"""Address space that is reserved and released at an out-of-memory error: reporting it needs some."""


def requested_bytes(message: str) -> int | None:
    """Return the size of the failed allocation, if the allocator's message has it."""
    found = re.search(r"allocate:? ([0-9.]+) ?(bytes?|[KMGT]iB)\b", message)
    return None if found is None else int(float(found[1]) * SIZES[found[2]])


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An out-of-memory error: where it happened, and the memory at that moment."""

    message: str
    """The allocator's message, in one line."""
    requested_bytes: int | None
    """Size of the failed allocation."""
    phase: str
    """`load`, `reading`, a phase of the step, `heldout`, `checkpoint` or `save`."""
    step: int | None
    """Optimizer step, from 0; None before the first."""
    number: int | None
    """Index of the micro-batch, from 0; None outside of one."""
    micro_batches: int
    """Of that step."""
    rows: int
    padded_tokens: int
    length: int
    """Of that micro-batch: rows, tokens with padding, tokens of each row (of all rows if joined)."""
    joined: bool
    live_bytes: int | None
    """Live tensors (on a CPU: growth of the process since the run started); None if unknown."""
    reserved_bytes: int | None
    by_category: Mapping[str, int]
    """Bytes of weights, gradients and optimizer state."""
    free_bytes: int | None
    """Of the device."""
    total_bytes: int | None
    addresses: AddressLimit | None
    """The limit of the address space, if that was exhausted; None if memory was."""
    weights_intact: bool
    """No weight has changed since the last finished step, so training can continue from it."""
    process_status: Mapping[str, int] | None
    """Linux's counters of this process on a CPU; None on a GPU."""

    @property
    def can_split(self) -> bool:
        """Whether smaller micro-batches can help: several rows were computed, and the step can be repeated."""
        return self.phase in (FORWARD, BACKWARD) and self.rows > 1 and self.weights_intact


class OutOfMemory(DoesNotFit):
    """Training ran out of memory and could not recover."""

    def __init__(self, message: str, *details: str, weights_intact: bool):
        """Pass message and details on; `weights_intact`: the weights are those of the last finished step."""
        super().__init__(message, *details)
        self.weights_intact = weights_intact


class RunPosition:
    """Tracks step, micro-batch and phase of a run. References model and optimizer to measure them at an error."""

    def __init__(self, device: torch.device, *, updates_in_backward: bool):
        """Create it before the model is loaded: memory in use now is not the run's."""
        self._device, self._counters = device, make_counters(device)
        self._updates_in_backward = updates_in_backward
        self._live_before = self._counters.read().live_bytes
        self._reserve: mmap.mmap | None = mmap.mmap(-1, RESERVE_BYTES)
        self.phase_name = READING
        self.step: int | None = None
        self._number: int | None = None
        self._micro_batches: Sequence[MicroBatch] = ()
        self._model: nn.Module | None = None
        self._optimizer: torch.optim.Optimizer | None = None

    def set_model(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Set model and optimizer once they are loaded."""
        self._model, self._optimizer = model, optimizer

    def start_step(self, step: int, micro_batches: Sequence[MicroBatch]) -> None:
        """Record that a step starts or is repeated."""
        self.step, self._micro_batches, self._number = step, micro_batches, None
        self.phase_name = READING
        if self._reserve is None:
            self._reserve = mmap.mmap(-1, RESERVE_BYTES)

    def __str__(self) -> str:
        """Phase and step, for a message."""
        step = "before the first step" if self.step is None else f"of optimizer step {self.step}"
        return f"in phase {self.phase_name} {step}"

    def tracked(self, phase: Phase) -> Phase:
        """Wrap the step's Phase hook so that this position follows it."""

        @contextmanager
        def tracked_phase(name: str) -> Iterator[None]:
            if name == FORWARD:
                self._number = 0 if self._number is None else self._number + 1
            with self.phase(name), phase(name):
                yield

        return tracked_phase

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name a part of the run; an exception leaves the name in place."""
        self.phase_name = name
        yield
        self.phase_name = READING

    def failure(self, error: BaseException) -> Failure:
        """Measure memory now; call while the exception is handled."""
        if self._reserve is not None:
            self._reserve.close()
            self._reserve = None
        counts = self._counters.read()
        cuda = self._device.type == "cuda"
        free, total = torch.cuda.mem_get_info(self._device) if cuda else (None, None)
        one = None if self._number is None else self._micro_batches[self._number]
        message = " ".join(f"{type(error).__name__}: {error}".split())
        requested = requested_bytes(message)
        growth = None if counts.live_bytes is None else counts.live_bytes - (self._live_before or 0)
        return Failure(
            message=message,
            requested_bytes=requested,
            phase=self.phase_name,
            step=self.step,
            number=self._number,
            micro_batches=len(self._micro_batches),
            rows=0 if one is None else len(one.rows),
            padded_tokens=0 if one is None else one.padded_tokens,
            length=0 if one is None else one.length,
            joined=one is not None and one.flat,
            live_bytes=growth,
            reserved_bytes=counts.reserved_bytes if cuda else None,
            by_category=self._by_category(),
            free_bytes=free,
            total_bytes=total,
            addresses=None if cuda else address_limit_met(requested),
            weights_intact=self.phase_name in ((FORWARD,) if self._updates_in_backward else (FORWARD, BACKWARD, CLIP)),
            process_status=None if cuda or not STATUS.exists() else process_status(),
        )

    def _by_category(self) -> dict[str, int]:
        """Return bytes on the device of weights, gradients and optimizer state."""
        if self._model is None or self._optimizer is None:
            return {}
        parameters = list(self._model.parameters())
        states = [v for state in self._optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
        tensors_by_category = {
            "weights": [*parameters, *self._model.buffers(), *quantisation_tensors(self._model)],
            "gradients": [parameter.grad for parameter in parameters if parameter.grad is not None],
            "optimizer": states,
        }
        sizes = {}
        for name, tensors in tensors_by_category.items():
            storages = [one.untyped_storage() for one in tensors if one.device.type == self._device.type]
            sizes[name] = sum({storage._cdata: storage.nbytes() for storage in storages}.values())  # Each once.
        return sizes


# Handle out-of-memory errors: report them, or repeat the step in smaller micro-batches (run.oom_recovery).
#
# A repeated step has the same rows, the same loss divisor and the same random numbers. Only the order in which
# gradients are summed differs from the plan.

Result = TypeVar("Result")
Attempt = Callable[[list[MicroBatch], Iterator[Batch]], Result]
"""Runs a step with these micro-batches. It changes no weight before the last backward pass has finished, and
restores the random state if it raises."""


class BatchStream:
    """The batches of one process, step by step in order. Close it to end its reader threads."""

    def __init__(
        self,
        rows: TokenRows,
        plan: Plan,
        *,
        start_step: int,
        rank: int,
        pad_id: int,
        pin_memory: bool,
        threads: int,
        part: TokenPart | None = None,
    ):
        """Start reading ahead at a step; arguments as `load`."""
        self._rows, self._plan, self._rank = rows, plan, rank
        self._load = partial(
            load, rows, plan, rank=rank, pad_id=pad_id, pin_memory=pin_memory, threads=threads, part=part
        )
        self._batches: Generator[Batch] = self._load(start_step=start_step)
        self._max_tokens: int | None = None

    def step(self, step: int) -> tuple[list[MicroBatch], Iterator[Batch]]:
        """Return this process's micro-batches of the next step, and an iterator over their tensors.

        Raises:
            UserError: from the iterator: the plan was made for other tokens, or the token files are damaged.
        """
        micro_batches = own_micro_batches(self._rows, self._plan, step, self._rank, self._max_tokens)
        return micro_batches, islice(self._batches, len(micro_batches))

    def split(self, step: int, max_tokens: int) -> None:
        """Restart at `step` with at most `max_tokens` padded tokens in a micro-batch of several rows.

        This applies to all later steps: their micro-batches are as large and would fail first.
        """
        self._batches.close()
        self._max_tokens = max_tokens
        self._batches = self._load(start_step=step, max_tokens=max_tokens)

    def close(self) -> None:
        """End the reader threads."""
        self._batches.close()


def plain_report(failure: Failure) -> OutOfMemory:
    """Return an error with the allocator's message, without a prediction."""
    message = f"bucket.max_tokens: out of memory in {failure.phase} ({failure.message}); lower it"
    return OutOfMemory(message, weights_intact=failure.weights_intact)


class OomHandler:
    """Catches every out-of-memory error of a run."""

    def __init__(
        self,
        device: torch.device,
        *,
        updates_in_backward: bool,
        split: bool = False,
        report: Callable[[Failure], OutOfMemory] = plain_report,
        on_step: Callable[[int], None] = lambda step: None,
        on_failure: Callable[[], object] = lambda: None,
    ):
        """Create it before the model is loaded.

        `split`: repeat a step that failed in smaller micro-batches. `updates_in_backward`: weights change during a
        step. `report` returns the error for the user. `on_step` is called as each step starts, `on_failure` before
        `report`, while the tensors that fill the memory still exist.
        """
        self._device, self._split, self._report = device, split, report
        self._on_step, self._on_failure = on_step, on_failure
        self.position = RunPosition(device, updates_in_backward=updates_in_backward)

    def step(
        self, step: int, stream: BatchStream, model: nn.Module, attempt: Attempt[Result]
    ) -> tuple[Result, list[MicroBatch]]:
        """Run a step, with micro-batches halved until they fit; return the result of `attempt` and those micro-batches.

        Raises:
            OutOfMemory: memory ran out, and splitting cannot help.
        """
        self._on_step(step)
        while True:
            micro_batches, batches = stream.step(step)
            self.position.start_step(step, micro_batches)
            try:
                return attempt(micro_batches, batches), micro_batches
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                failure = self.position.failure(error)
                recovers = self._split and failure.can_split
                if not recovers:
                    self._on_failure()
            # The exception is gone here, and with it the frames that referenced the step's tensors.
            model.zero_grad(set_to_none=True)
            gc.collect()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            if not recovers:
                raise self._report(failure)
            stream.split(step, failure.padded_tokens // 2)

    @contextmanager
    def reported(self) -> Iterator[None]:
        """Turn an out-of-memory error inside the block into an `OutOfMemory` with a remedy."""
        try:
            yield
            return
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failure = self.position.failure(error)
            self._on_failure()
        raise self._report(failure)


def split_figures(plan: Plan, curves: list[dict[str, Any]]) -> Mapping[str, int] | None:
    """Count the steps that ran in smaller micro-batches than planned; None without any."""
    planned = {row["step"]: len(plan.steps[row["step"]]) for row in curves}
    split = [row for row in curves if row["micro_batches"] != planned[row["step"]]]
    if not split:
        return None
    return {
        "first_step": split[0]["step"],
        "steps": len(split),
        "micro_batches_planned": sum(planned[row["step"]] for row in split),
        "micro_batches_run": sum(row["micro_batches"] for row in split),
    }
