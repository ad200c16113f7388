"""Train a few steps on the same eight rows, split into micro-batches as a test needs."""

import contextlib
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lean_finetune.config.schema import Train
from lean_finetune.step.batches import Batch, collate
from lean_finetune.step.offload.activation_offload import KEPT, KeptActivations
from lean_finetune.step.parallel_model import ParallelModel
from lean_finetune.step.run_optimizer import build_optimizer
from lean_finetune.step.step_loss import StepGoal
from lean_finetune.step.training_step import StepResult, training_step
from lean_finetune.step.update.loss_scaler import loss_scaler
from tests.kit.loaded import load_model
from tests.small_model import CPU, VOCABULARY, spec_of


def slow(*values: Any) -> Any:
    """A parameter set that runs in `make test-all` alone: another one of the same test proves the behaviour."""
    return pytest.param(*values, marks=pytest.mark.slow)


OPTIM = spec_of(optimizer="adamw", lr=1e-2, weight_decay=0.1, schedule="cosine", warmup_fraction=0.1)


def rows(count: int = 8) -> list[tuple[np.ndarray, np.ndarray]]:
    """Rows of differing lengths, the second half of each trained."""
    draw = np.random.default_rng(0)
    lengths = [6 + 3 * number for number in range(count)]
    return [
        (draw.integers(3, VOCABULARY, n).astype(np.uint16), np.array([[n // 2, n]], dtype=np.int32)) for n in lengths
    ]


def split(sizes: list[int]) -> list[Batch]:
    """The same eight rows in micro-batches of these sizes."""
    return [collate(group, max(len(ids) for ids, _ in group), 0) for group in _groups(sizes)]


def joined(sizes: list[int], padding: int = 0) -> list[Batch]:
    """The eight rows joined in groups of these sizes, with padding after each group."""
    return [collate(group, sum(len(ids) for ids, _ in group) + padding, 0, flat=True) for group in _groups(sizes)]


def _groups(sizes: list[int]) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    every = iter(rows())
    return [list(islice(every, size)) for size in sizes]


def run(
    directory: Path,
    batches: list[Batch],
    *,
    chunk: int | None = None,
    steps: int = 3,
    optim: Train = OPTIM,
    offload: KeptActivations = KEPT,
    max_grad_norm: float | None = 1.0,
    in_backward: bool = False,
    **spec: Any,
) -> tuple[list[StepResult], dict[str, torch.Tensor]]:
    """A few steps over the same micro-batches; results and trained parameters."""
    step = {"loss_chunk": chunk, "max_grad_norm": max_grad_norm, "optimizer_in_backward": in_backward}
    train = spec_of(**{**step, **spec})
    model = load_model(directory, train, CPU, seed=1)
    optimizer = build_optimizer(model, optim)
    torch.manual_seed(0)
    scaler, parallel = loss_scaler(train), ParallelModel(model)
    goal = StepGoal.of_any_rows(train, sum(len(batch.supervised_index_N) for batch in batches))
    results = [
        training_step(
            parallel,
            optimizer,
            iter(batches),
            before=(),
            micro_batches=len(batches),
            goal=goal,
            train=train,
            foreach=False,
            phase=lambda name: contextlib.nullcontext(),
            guard=lambda losses, norm: None,
            scaler=scaler,
            offload=offload,
        )
        for _ in range(steps)
    ]
    return results, {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], tolerance: float) -> None:
    """Trained parameters agree; tolerance 0 means to the last bit."""
    assert a.keys() == b.keys()
    for name in a:
        if tolerance == 0:
            assert torch.equal(a[name], b[name]), name
        else:
            torch.testing.assert_close(a[name], b[name], rtol=tolerance, atol=tolerance, msg=name)
