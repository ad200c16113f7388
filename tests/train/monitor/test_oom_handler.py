"""Out of memory in each phase is reported, and a step that can be split gives the planned result."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from lean_finetune.core.errors import UserError
from lean_finetune.train.checkpoint.checkpoint_files import CheckpointStore
from lean_finetune.train.checkpoint.checkpointer import Checkpointer
from lean_finetune.train.checkpoint.training_state import TrainingRun
from lean_finetune.train.job import TrainJob, TrainResult
from lean_finetune.train.loop import train
from lean_finetune.train.monitor.measured_peak import make_meter
from lean_finetune.train.monitor.memory_monitor import OomFailure
from lean_finetune.train.monitor.out_of_memory import OomHandler, TrainingOutOfMemory
from lean_finetune.train.process.stop_signals import StopRequest
from tests.small_model import CPU, spec_of
from tests.train.jobs import Tokens, make_job, plan_of, random_lengths, random_tokens

STEPS, ROWS = 3, 8


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> Tokens:
    return random_tokens(tmp_path_factory.mktemp("tokens"), random_lengths(12, 60, STEPS * ROWS), 3)


def job_of(directory: Path, tokens: Tokens, *, flat: bool = False, **model: Any) -> TrainJob:
    """Steps of two micro-batches: one of six rows and one of two."""
    steps = np.arange(len(tokens[0])).reshape(STEPS, ROWS).tolist()
    plan = plan_of(tokens[0], [(rows[:6], rows[6:]) for rows in steps], flat=flat)
    spec = spec_of(method="lora", **model)
    return make_job(directory, tokens, plan, train=spec, heldout_every_steps=STEPS, heldout_rows=3)


class Limited(TorchDispatchMode):
    """A device of limited memory: counts live tensors, and refuses more."""

    def __init__(self, capacity_bytes: int):
        super().__init__()
        self._capacity = capacity_bytes
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most_bytes = 0
        self.refusals = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._live = {key: one for key, one in self._live.items() if not one[0].expired()}
        live = sum(size for _, size in self._live.values())
        if live > self._capacity:
            self.refusals += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 MiB. GPU 0 has no more.")
        self.most_bytes = max(self.most_bytes, live)
        return out


class EndsIn(TorchDispatchMode):
    """Fails the first operations of a phase of a step."""

    def __init__(self, phase: str, step: int | None, times: int = 10**6):
        super().__init__()
        self._phase, self._step, self._times = phase, step, times
        self.position: Any = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.position.phase_name == self._phase and self.position.step == self._step and self._times > 0:
            self._times -= 1
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")
        return func(*args, **(kwargs or {}))


def handler_of(*, split: bool, seen: list[OomFailure], device: torch.device = CPU) -> OomHandler:
    """An OomHandler that adds its reports to `seen`."""

    def report(failure: OomFailure) -> TrainingOutOfMemory:
        seen.append(failure)
        return TrainingOutOfMemory(failure.phase, weights_intact=failure.weights_intact)

    return OomHandler(device, split=split, updates_in_backward=False, report=report)


def losses(result: TrainResult) -> list[float]:
    return [value for row in result.curves for value in (row["loss"], row["grad_norm"])]


def trained(result: TrainResult) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in result.model.parameters() if p.requires_grad])


@pytest.fixture(scope="module")
def plain(small_llama: Path, tokens) -> Callable[..., TrainResult]:
    """Runs with enough memory, computed once."""
    made: dict[bool, TrainResult] = {}

    def run(flat: bool) -> TrainResult:
        if flat not in made:
            made[flat] = train(job_of(small_llama, tokens, flat=flat), make_meter(CPU))
        return made[flat]

    return run


@pytest.mark.parametrize("flat", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_step_that_does_not_fit_is_split_and_gives_the_same_result(small_llama, tokens, plain, flat: bool):
    """A recovery that drops rows, sums twice, or divides by another number of tokens, with a normal-looking loss."""
    job = job_of(small_llama, tokens, flat=flat)
    with Limited(10**12) as free:
        train(job, make_meter(CPU))
    with Limited(int(0.6 * free.most_bytes)) as limited:
        result = train(job, make_meter(CPU), oom_handler=handler_of(split=True, seen=[]))
    assert limited.refusals > 0 and limited.most_bytes < 0.6 * free.most_bytes
    assert losses(result) == pytest.approx(losses(plain(flat)), rel=1e-5)
    torch.testing.assert_close(trained(result), trained(plain(flat)), rtol=1e-3, atol=1e-5)
    splits = result.oom_splits
    assert splits is not None and (splits["first_step"], splits["steps"]) == (0, STEPS)
    assert splits["micro_batches_planned"] == 2 * STEPS
    assert splits["micro_batches_run"] == sum(row["micro_batches"] for row in result.curves) > 2 * STEPS
    assert limited.refusals <= 3, "later steps are split before they fail"


@pytest.mark.slow
def test_repeated_step_draws_the_same_random_numbers(small_llama, tokens):
    """Dropout drawn anew after a failure: two runs of one seed that cannot be compared."""
    job = job_of(small_llama, tokens, lora_dropout=0.2)
    runs = []
    for phase in ("forward", "backward"):
        ends = EndsIn(phase, 1, times=1)
        oom_handler = handler_of(split=True, seen=[])
        ends.position = oom_handler.position
        with ends:
            runs.append(train(job, make_meter(CPU), oom_handler=oom_handler))
    first, second = runs
    assert losses(first) == losses(second) and torch.equal(trained(first), trained(second))
    assert [row["micro_batches"] for row in first.curves] == [2, 3, 3]
    unsplit = train(job, make_meter(CPU))
    assert losses(first)[:2] == losses(unsplit)[:2], "the steps before are untouched"


@pytest.mark.parametrize(
    ("phase", "step", "intact"),
    [
        ("load", None, False),
        ("forward", 1, True),
        pytest.param("backward", 1, True, marks=pytest.mark.slow),
        pytest.param("clip", 1, True, marks=pytest.mark.slow),
        ("optimizer", 1, False),
        ("heldout", 2, False),
    ],
)
def test_out_of_memory_is_reported_with_its_phase(small_llama, tokens, phase: str, step: int | None, intact: bool):
    """The batch size blamed where loading failed; a half-made update resumed from."""
    seen: list[OomFailure] = []
    oom_handler = handler_of(split=True, seen=seen)
    ends = EndsIn(phase, step)
    ends.position = oom_handler.position
    with ends, pytest.raises(TrainingOutOfMemory) as error, oom_handler.reported():
        train(job_of(small_llama, tokens), make_meter(CPU), oom_handler=oom_handler)
    (failure,) = seen
    assert (failure.phase, failure.step, failure.requested_bytes) == (phase, step, 9)
    assert error.value.weights_intact is intact
    if phase in ("forward", "backward"):
        assert failure.rows == 1, "halved down to one row first"


def test_other_exceptions_are_not_caught(small_llama, tokens):
    """A fault of the program reported as lack of memory."""
    oom_handler = handler_of(split=True, seen=[])
    with pytest.raises(RuntimeError, match="shape"), oom_handler.reported():
        raise RuntimeError("shape mismatch")


class AfterTheFirstStep(Checkpointer):
    """Writes one checkpoint, after the first step."""

    def is_due(self) -> bool:
        return True

    def after_step(self, run: TrainingRun, kept: int | None = None) -> bool:
        return run.step == 1 and super().after_step(run, kept)


@pytest.mark.parametrize(
    ("phase", "resumes_from"),
    [
        ("backward", 2),
        pytest.param("optimizer", 1, marks=pytest.mark.slow),
        pytest.param("heldout", 1, marks=pytest.mark.slow),
    ],
)
def test_finished_steps_are_saved_when_memory_runs_out(
    small_llama, tokens, plain, tmp_path: Path, phase: str, resumes_from: int
):
    """Hours of training lost with the last step; or a half-made update resumed from."""
    job = job_of(small_llama, tokens)
    oom_handler = handler_of(split=False, seen=[])
    ends = EndsIn(phase, 2, times=1)
    ends.position = oom_handler.position
    checkpoints = AfterTheFirstStep(CheckpointStore(tmp_path, 2, print), seconds=None, stop=StopRequest(), notify=print)
    with ends, pytest.raises(UserError) as error:
        train(job, make_meter(CPU), checkpoints, oom_handler)
    assert f"the checkpoint of optimizer step {resumes_from} is kept" in error.value.details[-1]
    again = Checkpointer(CheckpointStore(tmp_path, 2, print), seconds=None, stop=StopRequest(), notify=print)
    assert again.first_step == resumes_from
    result = train(job, make_meter(CPU), again)
    assert losses(result) == losses(plain(False)) and torch.equal(trained(result), trained(plain(False)))


GPU_STEPS, GPU_ROWS, LENGTH = 2, 512, 200
"""All logits at once: some hundreds of MiB, where weights, state and cuBLAS' workspaces are tens."""
SHARE = 0.6
"""Of what the run needs: too little for a micro-batch, and enough for one half or quarter as large."""


@pytest.fixture
def limited() -> Iterator[None]:
    """Gives the process all of the device again after the test."""
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def wide_job(model: Path, directory: Path) -> TrainJob:
    """One micro-batch a step, on the GPU."""
    tokens = random_tokens(directory, [LENGTH] * (GPU_STEPS * GPU_ROWS), 3)
    plan = plan_of(tokens[0], np.arange(GPU_STEPS * GPU_ROWS).reshape(GPU_STEPS, 1, GPU_ROWS).tolist())
    return make_job(model, tokens, plan, device=torch.device("cuda", 0), loss_chunk=None, foreach=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_out_of_memory_is_reported_and_recovered_with_the_same_losses(small_llama: Path, tmp_path: Path, limited):
    """CUDA's allocator behaves differently from the simulation on a CPU."""
    job = wide_job(small_llama, tmp_path)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    free = train(job, make_meter(job.device))
    needed = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(SHARE * needed / torch.cuda.mem_get_info()[1])
    seen: list[OomFailure] = []
    with pytest.raises(TrainingOutOfMemory):
        train(job, make_meter(job.device), oom_handler=handler_of(split=False, seen=seen, device=job.device))
    (failure,) = seen
    assert failure.phase in ("forward", "backward") and (failure.step, failure.rows) == (0, GPU_ROWS)
    assert failure.requested_bytes and failure.live_bytes and failure.reserved_bytes and failure.weights_intact
    assert failure.live_bytes >= sum(failure.by_category.values()) > 0
    result = train(job, make_meter(job.device), oom_handler=handler_of(split=True, seen=seen, device=job.device))
    assert losses(result) == pytest.approx(losses(free), rel=1e-4)
    assert result.oom_splits is not None and result.oom_splits["steps"] == GPU_STEPS
