"""What happens when memory runs out: the run ends with a report and a snapshot."""

import errno
import gc
import shlex
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from cuda_memory.diagnosis import analyse
from cuda_memory.snapshot_file import read_snapshot
from cuda_memory.units import GIB, MIB, counted, readable_size
from lean_finetune.config.field_types import MemorySnapshot, Method
from lean_finetune.config.optimizers import OPTIMIZERS
from lean_finetune.config.schema import Train
from lean_finetune.core.atomic_files import atomic_path, read_sealed, write_json
from lean_finetune.core.errors import DoesNotFit, UserError
from lean_finetune.distributed.processes import World
from lean_finetune.plan.batch_plan import MicroBatch
from lean_finetune.train.monitor.memory_monitor import READING, AddressLimit, OomFailure, RunPosition

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


class TrainingOutOfMemory(DoesNotFit):
    """Training ran out of memory."""

    def __init__(self, message: str, *details: str, weights_intact: bool):
        """Pass message and details on; `weights_intact`: the weights are those of the last finished step."""
        super().__init__(message, *details)
        self.weights_intact = weights_intact


def plain_report(failure: OomFailure) -> TrainingOutOfMemory:
    """Return an error with the allocator's message, without a prediction."""
    message = f"bucket.max_tokens: out of memory in {failure.phase} ({failure.message}); lower it"
    return TrainingOutOfMemory(message, weights_intact=failure.weights_intact)


class OomHandler:
    """Catches every out-of-memory error of a run."""

    def __init__(
        self,
        device: torch.device,
        *,
        updates_in_backward: bool,
        report: Callable[[OomFailure], TrainingOutOfMemory] = plain_report,
        on_step: Callable[[int], None] = lambda step: None,
        on_failure: Callable[[], object] = lambda: None,
    ):
        """Create it before the model is loaded.

        `updates_in_backward`: weights change during a step. `report` returns the error for the user. `on_step` is
        called as each step starts, `on_failure` before `report`, while the tensors that fill the memory still exist.
        """
        self._device, self._report = device, report
        self._on_step, self._on_failure = on_step, on_failure
        self.position = RunPosition(device, updates_in_backward=updates_in_backward)

    def start_step(self, step: int, micro_batches: Sequence[MicroBatch]) -> None:
        """Record that a step starts, with this process's micro-batches of it."""
        self._on_step(step)
        self.position.start_step(step, micro_batches)

    @contextmanager
    def reported(self) -> Iterator[None]:
        """Turn an out-of-memory error inside the block into a `TrainingOutOfMemory` with a remedy.

        The tensors of the step are free then, so that a checkpoint can be saved.
        """
        try:
            yield
            return
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failure = self.position.failure(error)
            self._on_failure()
            _clear_frames(error)
        self.position.free_gradients()
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        raise self._report(failure)


def _clear_frames(error: BaseException | None) -> None:
    """Free what the frames reference that an exception has passed, among it the step's tensors."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


# The history of CUDA's allocator during training (run.memory_snapshot).
#
# `lean-finetune snapshot FILE` explains the file. Not measured on a GPU: the tests replace the two functions of
# PyTorch that record and read the history.
#
# Recording takes no GPU memory. Of each allocation PyTorch stores the Python stack, in 2 us by its documentation,
# while the GPU still computes what was launched before. The lines of a stack are looked up when the file is written:
# with C++ frames that took 461 s, without them 4 s (pytorch/torchtitan#3628).

MAX_ENTRIES = 100_000
"""Latest actions of the allocator that are stored, about three per tensor; the file then has about 21 MiB."""
FIRST_STEPS = 3
"""Steps after which `first_steps` writes its file."""
OOM_FILE, FIRST_STEPS_FILE = "oom_snapshot", "first_steps_snapshot"


class MemorySnapshots:
    """Records from its creation on, and writes snapshots to a directory; does nothing on a CPU or with `never`."""

    def __init__(
        self,
        choice: MemorySnapshot,
        device: torch.device,
        directory: Path,
        world: World,
        notify: Callable[[str], None],
    ):
        """Start recording; create it before the model is loaded.

        Raises:
            UserError: `first_steps` cannot be done on this device or with this allocator.
        """
        self._directory, self._notify = directory, notify
        self._suffix = "" if world.size == 1 else f"_rank{world.rank}"
        self._steps = 0
        obstacle = _obstacle(device)
        if choice == "first_steps" and obstacle is not None:
            raise UserError(f"run.memory_snapshot: first_steps records PyTorch's CUDA allocator; {obstacle}; use never")
        self._records = choice != "never" and obstacle is None
        self._first_steps_are_due = choice == "first_steps"
        if self._records:
            torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=MAX_ENTRIES)

    def step_started(self) -> None:
        """Write the first steps once they are finished."""
        self._steps += 1
        if self._steps > FIRST_STEPS:
            self.close()

    def close(self) -> None:
        """Write the first steps of a run that has ended, if they are not written yet."""
        if self._first_steps_are_due and self._steps > 0:
            self._first_steps_are_due = False
            path = self.write(FIRST_STEPS_FILE)
            if path is not None:
                command = shlex.join(["lean-finetune", "snapshot", str(path)])
                self._notify(f"note: explain the memory of the first steps with: {command}")

    def write(self, name: str) -> Path | None:
        """Write all that is recorded; return the file, or None without one. A fault is reported, never raised."""
        if not self._records:
            return None
        path = self._directory / f"{name}{self._suffix}.pickle"
        try:
            with atomic_path(path) as temporary:
                torch.cuda.memory._dump_snapshot(str(temporary))
        except Exception as error:  # Neither ends a training nor hides the error that ends it.
            self._notify(f"warning: {path}: no snapshot of the memory was written ({error})")
            return None
        return path


def _obstacle(device: torch.device) -> str | None:
    """Why there is no history to record; None if there is one."""
    if device.type != "cuda":
        return "this run trains on the CPU"
    backend = torch.cuda.get_allocator_backend()
    return None if backend == "native" else f"this run uses {backend}"


# The report: where, predicted and measured memory, and what would fit.

MOST_CATEGORIES = 4
MOST_COMMANDS, MOST_PLACES = 3, 3
MOST_CHARACTERS = 160
"""Of the allocator's message: CUDA's continues with figures that the report has itself."""
WHAT_FITS = "lean-finetune fit --gpu"
OWN_SHARE = 1 / 32
"""Share of an address-space limit below which the run is not the cause, and changing it does not help."""
SMALLEST_GPU_BYTES = GIB
"""`lean-finetune fit` refuses smaller GPUs: a CUDA context alone would fill them."""
MORE_MEMORY = ("hardware.gpu", "give the run more memory")
FEWER_BITS: Mapping[Method, str] = {"full": "lora or qlora", "lora": "qlora", "int8_lora": "qlora"}
"""Methods that store weights in fewer bits, by the current method."""


@dataclass(frozen=True, kw_only=True)
class EstimateOutputs:
    """Outputs of stage estimate. They are read only after an out-of-memory error and never change a result."""

    metrics: Mapping[str, Any]
    """data/estimate/figures.json."""
    breakdown: Mapping[str, Mapping[str, int]]
    """breakdown.json: bytes by phase and category; empty if the file is missing or damaged."""
    advice: Mapping[str, Any]
    """advice.json; empty if the file is missing or damaged."""


def read_prediction(metrics: Mapping[str, Any], directory: Path) -> EstimateOutputs:
    """Read what `directory` (data/estimate) has."""
    found: list[dict[str, Any]] = []
    for name in ("breakdown.json", "advice.json"):
        try:
            found.append(read_sealed(directory / name))
        except UserError:  # That memory ran out is what the user must know.
            found.append({})
    return EstimateOutputs(metrics=metrics, breakdown=found[0], advice=found[1])


def oom_error(
    failure: OomFailure,
    prediction: EstimateOutputs,
    *,
    device: str,
    train: Train,
    record: Path,
    snapshot: Path | None,
) -> TrainingOutOfMemory:
    """Return the error that ends the run, and write all details to `record`, a JSON file.

    The method, precision and optimizer of `train` are never proposed. `snapshot` is the file of the allocator's
    history, if one was written.
    """
    commands = changes_that_fit(failure, prediction)
    message = failure.message
    filled, peak = ([], None) if snapshot is None else _explained(snapshot)
    content = {
        "failure": asdict(failure),
        "predicted": _by_phase(failure, prediction),
        "changes": commands,
        "snapshot": peak,
    }
    try:
        write_json(record, content)
        written = f"details: {record}"
    except UserError as error:  # It must not hide the out-of-memory error.
        written = f"no details were written: {error}"
    details = [
        *_predicted_line(failure, prediction),
        _measured_line(failure),
        *filled,
        f"allocator: {message if len(message) <= MOST_CHARACTERS else f'{message[:MOST_CHARACTERS]}…'}",
        *commands,
        written,
    ]
    parameter, remedy = _first_remedy(failure, train)
    text = f"{parameter}: {_where(failure, device)}; {remedy}, or change the run as below"
    if failure.addresses is not None:
        text = _address_error(failure, prediction, device, failure.addresses, f"{parameter}: {remedy}")
    return TrainingOutOfMemory(text, *details, weights_intact=failure.weights_intact)


def _first_remedy(failure: OomFailure, train: Train) -> tuple[str, str]:
    """Return the parameter that helps most in the phase that failed, and how to change it."""
    if failure.phase in ("checkpoint", "save"):
        return MORE_MEMORY
    if failure.phase == "load":
        types = "" if train.precision in ("bf16", "pure_bf16", "fp16") else "train.precision=bf16"
        bits = " and ".join(filter(None, (FEWER_BITS.get(train.method), types)))
        return ("train.method", f"store the weights in fewer bits ({bits})") if bits else MORE_MEMORY
    if failure.phase == "clip":
        return ("train.method", "train fewer weights") if train.method == "full" else ("train.lora.rank", "lower it")
    if failure.phase == "optimizer":
        has_state = OPTIMIZERS[train.optimizer].has_state
        return ("train.optimizer", "use one with less state") if has_state else MORE_MEMORY
    if failure.rows == 1 and not failure.joined:
        return "data.max_length", "the micro-batch has only one row; lower it"
    return "bucket.max_tokens", "lower it"


def _address_error(
    failure: OomFailure, prediction: EstimateOutputs, device: str, limit: AddressLimit, remedy: str
) -> str:
    """Return the message for an exhausted address space; `remedy` is what else reduces the run's memory."""
    own_bytes = (failure.live_bytes or 0) + (failure.requested_bytes or 0)
    own_bytes = max(own_bytes, sum(_by_phase(failure, prediction).values()))
    other = f", or {remedy}" if own_bytes >= OWN_SHARE * limit.limit_bytes else ""
    return (
        f"ulimit -v: {_where(failure, device)}: the address space of a process (RLIMIT_AS) has its libraries and files "
        f"too; it is limited to {readable_size(limit.limit_bytes)}, {readable_size(limit.used_bytes)} are in use, "
        f"{readable_size(failure.live_bytes or 0)} of them by the run; raise the limit (ulimit -v unlimited, or in the "
        f"job's settings){other}"
    )


def changes_that_fit(failure: OomFailure, prediction: EstimateOutputs) -> list[str]:
    """Return lines with the cheapest changes that are predicted to fit, or with the command that finds some."""
    advised = prediction.advice.get("remedies", [])
    if not advised and failure.live_bytes is not None and failure.phase != "load":
        # The memory in use at the error is what a change has to fit into. The smallest changes come first.
        changes = prediction.advice.get("single_changes", [])
        advised = [change for change in changes if change["peak_bytes"] <= failure.live_bytes]
    lines = [f"would fit: {one['command']} ({readable_size(one['peak_bytes'])})" for one in advised[:MOST_COMMANDS]]
    if not lines and failure.addresses is None and (failure.live_bytes or 0) >= SMALLEST_GPU_BYTES:
        return [f"to list what would fit, run: {WHAT_FITS} {(failure.live_bytes or 0) // MIB}MiB"]
    return lines


def _where(failure: OomFailure, device: str) -> str:
    """Name device, phase, step and micro-batch."""
    size = "" if failure.requested_bytes is None else f" allocating {readable_size(failure.requested_bytes)}"
    phase = "between phases" if failure.phase == READING else f"in {failure.phase}"
    where = f"{device} ran out of memory{size} {phase}"
    if failure.step is None:
        return where
    where += f" of optimizer step {failure.step}"
    if failure.number is not None:
        rows = f"{counted(failure.rows, 'row')} joined to" if failure.joined else f"{failure.rows} x"
        where += f", micro-batch {failure.number} of {failure.micro_batches} ({rows} {failure.length} tokens)"
    return where


def _by_phase(failure: OomFailure, prediction: EstimateOutputs) -> Mapping[str, int]:
    """Return predicted bytes by category in the failed phase, or at the peak if that phase has no prediction."""
    return prediction.breakdown.get(failure.phase) or prediction.breakdown.get("peak") or {}


def _predicted_line(failure: OomFailure, prediction: EstimateOutputs) -> list[str]:
    """Return a line with the predicted memory; none without a prediction."""
    by_category = _by_phase(failure, prediction)
    if not by_category:
        return []
    metrics = prediction.metrics
    phase = failure.phase if failure.phase in prediction.breakdown else metrics["worst_phase"]
    device = f"{metrics['gpu']} of {metrics['capacity_gib']:g} GiB"
    total = readable_size(sum(by_category.values()))
    return [f"predicted: {total} of tensors at most in {phase} ({_largest(by_category)}), for {device}"]


def _measured_line(failure: OomFailure) -> str:
    """Return a line with the measured memory."""
    if failure.live_bytes is None:
        return "measured: unknown, this system has no allocator statistics"
    rest = failure.live_bytes - sum(failure.by_category.values())
    by_category = {**failure.by_category, "activations and all else": max(rest, 0)}
    reserved = "" if failure.reserved_bytes is None else f"; {readable_size(failure.reserved_bytes)} reserved"
    free = ""
    if failure.free_bytes is not None and failure.total_bytes is not None:
        free = f"; {readable_size(failure.free_bytes)} of {readable_size(failure.total_bytes)} free on the device"
    return f"measured: {readable_size(failure.live_bytes)} ({_largest(by_category)}){reserved}{free}"


def _explained(snapshot: Path) -> tuple[list[str], dict[str, Any] | None]:
    """Return lines with what filled the memory when the request failed, and all that was live then."""
    command = shlex.join(["lean-finetune", "snapshot", str(snapshot)])
    try:
        analyses = [analyse(recording) for recording in read_snapshot(snapshot)]
    except Exception as error:  # It must not hide the out-of-memory error.
        return [f"the snapshot could not be explained ({error}); try: {command}"], None
    analysis = max(analyses, key=lambda one: (len(one.failures), one.peak.allocated_bytes))
    places = [f"{one.where} {readable_size(one.bytes)}" for one in analysis.peak.lines[:MOST_PLACES]]
    peak: dict[str, Any] = analysis.as_json()["peak"]
    filled = f"filled by: {_largest(peak['by_category'])}; most of it from {', '.join(places)}"
    return [
        *([filled] if places else []),
        f"more: {command}",
    ], peak  # Without a tensor another process fills the device.


def _largest(by_category: Mapping[str, int]) -> str:
    """List the largest categories, largest first."""
    by_size = sorted((-size, name) for name, size in by_category.items() if size)
    return ", ".join(f"{name} {readable_size(-size)}" for size, name in by_size[:MOST_CATEGORIES])
