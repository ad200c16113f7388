"""Out of memory in each phase is reported, and what finished steps have trained is kept."""

from collections.abc import Iterator
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


def job_of(directory: Path, tokens: Tokens) -> TrainJob:
    """Steps of two micro-batches: one of six rows and one of two."""
    steps = np.arange(len(tokens[0])).reshape(STEPS, ROWS).tolist()
    plan = plan_of(tokens[0], [(rows[:6], rows[6:]) for rows in steps])
    spec = spec_of(method="lora")
    return make_job(directory, tokens, plan, train=spec, heldout_every_steps=STEPS, heldout_rows=3)


class Limited(TorchDispatchMode):
    """A device of limited memory: counts live tensors, and refuses more."""

    def __init__(self, capacity_bytes: int):
        super().__init__()
        self._capacity = capacity_bytes
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        live = self.live_bytes()
        if live > self._capacity:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 MiB. GPU 0 has no more.")
        self.most_bytes = max(self.most_bytes, live)
        return out

    def live_bytes(self) -> int:
        self._live = {key: one for key, one in self._live.items() if not one[0].expired()}
        return sum(size for _, size in self._live.values())


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


def handler_of(seen: list[OomFailure], device: torch.device = CPU) -> OomHandler:
    """An OomHandler that adds its reports to `seen`."""

    def report(failure: OomFailure) -> TrainingOutOfMemory:
        seen.append(failure)
        return TrainingOutOfMemory(failure.phase, weights_intact=failure.weights_intact)

    return OomHandler(device, updates_in_backward=False, report=report)


def losses(result: TrainResult) -> list[float]:
    return [value for row in result.curves for value in (row["loss"], row["grad_norm"])]


def trained(result: TrainResult) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in result.model.parameters() if p.requires_grad])


@pytest.fixture(scope="module")
def plain(small_llama: Path, tokens) -> TrainResult:
    """A run with enough memory."""
    return train(job_of(small_llama, tokens), make_meter(CPU))


def test_the_steps_tensors_are_free_when_the_run_ends(small_llama, tokens):
    """The checkpoint of the last step that does not fit, beside the activations and gradients of the failed one."""
    job = job_of(small_llama, tokens)
    with Limited(10**12) as free:
        train(job, make_meter(CPU))
        kept = free.live_bytes()
    after: list[int] = []

    def report(failure: OomFailure) -> TrainingOutOfMemory:
        after.append(little.live_bytes())
        return TrainingOutOfMemory(failure.phase, weights_intact=failure.weights_intact)

    oom_handler = OomHandler(CPU, updates_in_backward=False, report=report)
    with Limited(int(0.8 * free.most_bytes)) as little, pytest.raises(TrainingOutOfMemory):
        train(job, make_meter(CPU), oom_handler=oom_handler)
    assert kept <= after[0] < 1.5 * kept < 0.3 * free.most_bytes, (after, kept, free.most_bytes)


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
    oom_handler = handler_of(seen)
    ends = EndsIn(phase, step)
    ends.position = oom_handler.position
    with ends, pytest.raises(TrainingOutOfMemory) as error, oom_handler.reported():
        train(job_of(small_llama, tokens), make_meter(CPU), oom_handler=oom_handler)
    (failure,) = seen
    assert (failure.phase, failure.step, failure.requested_bytes) == (phase, step, 9)
    assert error.value.weights_intact is intact


def test_other_exceptions_are_not_caught(small_llama, tokens):
    """A fault of the program reported as lack of memory."""
    oom_handler = handler_of([])
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
    oom_handler = handler_of([])
    ends = EndsIn(phase, 2, times=1)
    ends.position = oom_handler.position
    checkpoints = AfterTheFirstStep(CheckpointStore(tmp_path, 2, print), seconds=None, stop=StopRequest(), notify=print)
    with ends, pytest.raises(UserError) as error:
        train(job, make_meter(CPU), checkpoints, oom_handler)
    assert f"the checkpoint of optimizer step {resumes_from} is kept" in error.value.details[-1]
    again = Checkpointer(CheckpointStore(tmp_path, 2, print), seconds=None, stop=StopRequest(), notify=print)
    assert again.first_step == resumes_from
    result = train(job, make_meter(CPU), again)
    assert losses(result) == losses(plain) and torch.equal(trained(result), trained(plain))


GPU_STEPS, GPU_ROWS, LENGTH = 2, 512, 200
"""All logits at once: some hundreds of MiB, where weights, state and cuBLAS' workspaces are tens."""
SHARE = 0.6
"""Of what the run needs: too little for a micro-batch."""


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
def test_gpu_out_of_memory_is_reported(small_llama: Path, tmp_path: Path, limited):
    """CUDA's allocator behaves differently from the simulation on a CPU."""
    job = wide_job(small_llama, tmp_path)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    train(job, make_meter(job.device))
    needed = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(SHARE * needed / torch.cuda.mem_get_info()[1])
    seen: list[OomFailure] = []
    with pytest.raises(TrainingOutOfMemory):
        train(job, make_meter(job.device), oom_handler=handler_of(seen, job.device))
    (failure,) = seen
    assert failure.phase in ("forward", "backward") and (failure.step, failure.rows) == (0, GPU_ROWS)
    assert failure.requested_bytes and failure.live_bytes and failure.reserved_bytes and failure.weights_intact
    assert failure.live_bytes >= sum(failure.by_category.values()) > 0
