"""The loader: order and bytes of the plan with any number of threads and any first step; all threads exit."""

import threading
from typing import Any, cast

import numpy as np
import pytest
import torch

from lean_finetune.core.errors import UserError
from lean_finetune.plan.batch_plan import MicroBatch, Plan
from lean_finetune.step.batch_stream import load
from lean_finetune.step.batches import IGNORED, Batch, read_batch
from lean_finetune.step.token_rows import TokenRows
from tests.token_files import Row, write_tokens

STEPS, RANKS, MICRO_STEPS = 9, 2, 2


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> TokenRows:
    draw = np.random.default_rng(3)
    rows: list[Row] = []
    for _ in range(200):
        length = int(draw.integers(4, 60))
        rows.append((draw.integers(0, 500, length).tolist(), [length // 2, length], None))
    return TokenRows(write_tokens(tmp_path_factory.mktemp("tokens"), rows, block=7), "train")


def plan_for(tokens: TokenRows, *, flat: bool, broken_step: int | None = None) -> Plan:
    """Random rows in every micro-batch; those of `broken_step` claim too many trained tokens."""
    draw = np.random.default_rng(4)
    planned = []
    for step in range(STEPS):
        for place in range(RANKS * MICRO_STEPS):
            rows = draw.choice(len(tokens), 5, replace=False).astype(np.int32)
            lengths = tokens.lengths[rows]
            planned.append(
                MicroBatch(
                    epoch=0,
                    step=step,
                    rank=place % RANKS,
                    rows=rows,
                    length=int(lengths.sum() if flat else lengths.max()) + 3,
                    supervised=int(tokens.supervised[rows].sum()) + (step == broken_step),
                    flat=flat,
                )
            )
    return Plan.of(planned, ranks=RANKS)


def contents(batches) -> list[tuple[torch.Tensor, ...]]:
    """Copies of the batches' tensors."""

    def of(batch: Batch) -> tuple[torch.Tensor, ...]:
        joined = () if batch.packed_rows is None else (batch.packed_rows.offsets, batch.packed_rows.positions_BT)
        return (batch.input_ids_BT, batch.targets_BT, batch.supervised_index_N, *joined)

    return [of(batch) for batch in batches]


def assert_same(found, expected) -> None:
    for a, b in zip(found, expected, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def loader_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("loader")]


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("threads", [0, 1, 3])
def test_batches_are_those_of_the_plan_in_order_whatever_the_threads(tokens, flat, threads):
    plan = plan_for(tokens, flat=flat)
    for rank in range(RANKS):
        expected = [read_batch(tokens, one, 0) for step in plan.steps for one in step if one.rank == rank]
        assert len(expected) == STEPS * MICRO_STEPS
        assert_same(contents(load(tokens, plan, rank=rank, pad_id=0, threads=threads)), contents(expected))
    assert not loader_threads()


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("start", [0, 1, 5, STEPS - 1, STEPS])
def test_a_run_resumed_at_a_step_reads_the_rest_of_the_batches(tokens, start, threads):
    """Trainers that count rows instead of steps have repeated up to half of them after a resume."""
    plan = plan_for(tokens, flat=True)
    full = contents(load(tokens, plan, pad_id=0))
    resumed = contents(load(tokens, plan, start_step=start, pad_id=0, threads=threads))
    assert_same(resumed, full[start * MICRO_STEPS :])


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_a_fault_is_raised_at_its_batch_and_ends_the_threads(tokens, threads):
    """A fault raised early, or never, would hide which step is wrong."""
    stream = load(tokens, plan_for(tokens, flat=False, broken_step=4), pad_id=0, threads=threads)
    for _ in range(4 * MICRO_STEPS):
        next(stream)
    with pytest.raises(UserError, match="rows of step 4 differ from the batch plan"):
        next(stream)
    assert not loader_threads()


@pytest.mark.parametrize("threads", [1, 3])
def test_a_loader_closed_early_leaves_no_thread_and_has_read_few_batches(tokens, threads):
    """A failed run that hangs on its readers; a fast reader before a slow step that fills the memory."""
    read = []

    class Counted:
        def __getattr__(self, name: str) -> Any:
            return getattr(tokens, name)

        def __len__(self) -> int:
            return len(tokens)

        def gather(self, rows: np.ndarray) -> Any:
            read.append(rows)
            return tokens.gather(rows)

    stream = load(cast(TokenRows, Counted()), plan_for(tokens, flat=False), pad_id=0, threads=threads)
    next(stream)
    assert loader_threads()
    stream.close()
    assert not loader_threads() and len(read) <= 2 * threads + 1


@pytest.mark.parametrize("threads", [0, 2])
def test_a_gpu_without_rows_gets_padding_without_targets(tokens, threads):
    """Without a batch it would not join the all-reduce of gradients: the run would hang."""
    numbers = np.array([3, 5], np.int32)
    length, supervised = int(tokens.lengths[numbers].max()), int(tokens.supervised[numbers].sum())
    work = MicroBatch(epoch=0, step=0, rows=numbers, length=length, supervised=supervised)
    idle = MicroBatch(epoch=0, step=0, rank=1, rows=numbers[:0], length=0, supervised=0)
    plan = Plan.of([work, idle], ranks=2)
    (real,), (padding,) = (list(load(tokens, plan, rank=rank, pad_id=7, threads=threads)) for rank in (0, 1))
    assert len(real.supervised_index_N) == supervised
    assert not len(padding.supervised_index_N) and (padding.targets_BT == IGNORED).all()
    assert (padding.input_ids_BT == 7).all() and len(padding.input_ids_BT) == 1
