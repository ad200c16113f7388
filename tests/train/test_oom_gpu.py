"""Out of memory on a real GPU: PyTorch's allocator gets a share of what a run needs."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from lean_finetune.step.training_step import StepSpec
from lean_finetune.train.loop import train
from lean_finetune.train.monitor.measured_peak import make_meter
from lean_finetune.train.oom.oom_handler import OomHandler
from lean_finetune.train.oom.oom_state import MOST_BLOCKS, MOST_SEGMENTS, Failure, OutOfMemory
from lean_finetune.train.train_job import TrainJob
from tests.train.jobs import make_job, plan_of, random_tokens
from tests.train.test_oom_handler import losses

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
STEPS, ROWS, LENGTH = 2, 512, 200
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
    tokens = random_tokens(directory, [LENGTH] * (STEPS * ROWS), 3)
    plan = plan_of(tokens[0], np.arange(STEPS * ROWS).reshape(STEPS, 1, ROWS).tolist())
    step_spec = StepSpec(loss_chunk=None, max_grad_norm=1.0, foreach=True)
    return make_job(model, tokens, plan, device=torch.device("cuda", 0), step_spec=step_spec)


def test_gpu_out_of_memory_is_reported_and_recovered_with_the_same_losses(small_llama: Path, tmp_path: Path, limited):
    """CUDA's allocator behaves differently from the simulation on a CPU."""
    job = wide_job(small_llama, tmp_path)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    free = train(job, make_meter(job.device))
    needed = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(SHARE * needed / torch.cuda.mem_get_info()[1])
    seen: list[Failure] = []

    def report(failure: Failure) -> OutOfMemory:
        seen.append(failure)
        return OutOfMemory(failure.message, weights_intact=failure.weights_intact)

    def oom_handler(*, split: bool) -> OomHandler:
        return OomHandler(job.device, split=split, updates_in_backward=False, report=report)

    with pytest.raises(OutOfMemory):
        train(job, make_meter(job.device), oom_handler=oom_handler(split=False))
    (failure,) = seen
    assert failure.phase in ("forward", "backward") and (failure.step, failure.rows) == (0, ROWS)
    assert failure.requested_bytes and failure.live_bytes and failure.reserved_bytes and failure.weights_intact
    assert failure.live_bytes >= sum(failure.by_category.values()) > 0
    segments = failure.snapshot["segments"]
    assert 0 < len(segments) <= MOST_SEGMENTS and all(len(one["blocks"]) <= MOST_BLOCKS for one in segments)
    result = train(job, make_meter(job.device), oom_handler=oom_handler(split=True))
    assert losses(result) == pytest.approx(losses(free), rel=1e-4)
    assert result.oom_splits is not None and result.oom_splits["steps"] == STEPS
