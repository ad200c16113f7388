"""Helpers of the tests of batch plans."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

from lean_finetune.core.arrow_files import ArrowWriter
from lean_finetune.objectives.row_kind import RowKind
from lean_finetune.plan.batch_plan import MicroBatch, Plan
from lean_finetune.plan.micro_batches import MicroBatchSettings, split_steps
from lean_finetune.plan.optimizer_steps import COLUMNS, RowIndex, run_steps


def index_of(lengths, supervised=None, *, sources=None, dropped=None, weights=(1.0,)) -> RowIndex:
    lengths = np.asarray(lengths, np.int32)
    return RowIndex(
        lengths=lengths,
        supervised=lengths // 2 if supervised is None else np.asarray(supervised, np.int32),
        sources=np.zeros(len(lengths), np.uint16) if sources is None else np.asarray(sources, np.uint16),
        dropped=np.zeros(len(lengths), bool) if dropped is None else np.asarray(dropped, bool),
        weights=weights,
    )


def batch_settings_of(**changes) -> MicroBatchSettings:
    given: dict[str, Any] = {
        "mode": "bucketed",
        "max_tokens": 1024,
        "pad_multiple": 8,
        "constant_shape": False,
        "fixed_rows": 4,
        "ranks": 1,
    }
    return MicroBatchSettings(**(given | changes))


def plan_of(
    index: RowIndex, batch_settings: MicroBatchSettings, *, seed: int = 1, epochs: int = 1, tokens_per_step: int
) -> Plan:
    steps = run_steps(index, seed=seed, epochs=epochs, tokens_per_step=tokens_per_step)
    return Plan.joined(list(split_steps(steps, index, batch_settings)))


def steps_of(index: RowIndex, *, seed: int, epochs: int, tokens_per_step: int) -> list[tuple[int, np.ndarray]]:
    """Epoch and rows of every step."""
    parts = run_steps(index, seed=seed, epochs=epochs, tokens_per_step=tokens_per_step)
    return [(part.epoch, part.rows[start:end]) for part in parts for start, end in pairwise(part.bounds)]


@st.composite
def runs(draw, ranks=st.just(1)):  # noqa: B008 - immutable
    """An index, and the parameters of a run over it."""
    lengths = draw(st.lists(st.integers(2, 90), min_size=1, max_size=60))
    supervised = [draw(st.integers(1, length - 1)) for length in lengths]
    pad_multiple = draw(st.integers(1, 16))
    longest = -(-max(lengths) // pad_multiple) * pad_multiple
    mode = draw(st.sampled_from(["bucketed", "packed", "fixed"]))
    return {
        "index": index_of(lengths, supervised),
        "batch_settings": batch_settings_of(
            mode=mode,
            max_tokens=longest + draw(st.integers(0, 400)),
            pad_multiple=pad_multiple,
            constant_shape=mode == "packed" and draw(st.booleans()),
            fixed_rows=draw(st.integers(1, 9)),
            ranks=draw(ranks),
        ),
        "seed": draw(st.integers(0, 2**32 - 1)),
        "epochs": draw(st.integers(1, 3)),
        "tokens_per_step": draw(st.integers(1, 600)),
    }


def all_batches(plan: Plan) -> list[MicroBatch]:
    return [batch for step in plan.steps for batch in step]


def rows_by_step(plan: Plan) -> list[list[int]]:
    return [sorted(np.concatenate([batch.rows for batch in step]).tolist()) for step in plan.steps]


def log_normal_lengths(rows: int) -> np.ndarray:
    drawn = np.exp(np.random.default_rng(5).normal(4.5, 0.8, rows)).astype(np.int32)
    return np.clip(drawn, 4, 1024)


def write_index(
    path: Path, lengths, supervised, *, sources=None, dropped=None, names=tuple(COLUMNS), kind=RowKind.ANSWER
) -> None:
    """An index file as tokenize writes it, in one record batch."""
    path.parent.mkdir(parents=True, exist_ok=True)
    values = [lengths, supervised, sources or [0] * len(lengths), dropped or [False] * len(lengths)]
    arrays = [pa.array(value, types[0]) for value, types in zip(values, COLUMNS.values(), strict=True)]
    batch = pa.record_batch(arrays, names=list(names)).replace_schema_metadata(kind.metadata or None)
    with ArrowWriter(path, batch.schema) as writer:
        writer.write(batch)
