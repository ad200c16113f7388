"""The contestants of benchmarks.batching: each makes micro-batches for 8 GPUs from row lengths, by its own code."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from transformers.trainer_pt_utils import BatchRebalanceSampler, LengthGroupedSampler

from benchmarks.processes import Rival
from lean_finetune.core.arrow_files import ArrowWriter
from lean_finetune.plan.micro_batches import MicroBatchSettings
from lean_finetune.plan.optimizer_steps import COLUMNS, RowIndex
from lean_finetune.plan.planner import PlanSettings, randomness, straggler_percent
from tests.kit.write_params import write_params

RANKS = 8
CAPACITY = 16_384
PAD_MULTIPLE = 8
ROWS_PER_BATCH = 8
"""Rows of a micro-batch of contestants that have a fixed number of rows."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Batches:
    """Micro-batches in execution order, `ranks` of them at a time."""

    rows: np.ndarray
    bounds: np.ndarray
    padded_tokens: np.ndarray
    step_bounds: np.ndarray
    """First micro-batch of each optimizer step, and the number of micro-batches."""
    ranks: int = RANKS

    def figures(self, lengths: np.ndarray) -> dict[str, float | int | None]:
        """Columns of the table."""
        padding = 1 - int(lengths[self.rows].sum(dtype=np.int64)) / int(self.padded_tokens.sum())
        return {
            "padding_percent": round(100 * padding, 2),
            "straggler_percent": round(straggler_percent(self.padded_tokens, self.ranks), 2),
            "largest_tokens": int(self.padded_tokens.max()),
            "steps": len(self.step_bounds) - 1,
            "batches_per_step": round(float(np.diff(self.step_bounds).mean()), 1),
            "randomness": randomness(lengths[self.rows], self.bounds[self.step_bounds]),
        }


def ours(
    lengths: np.ndarray, *, mode: str, constant_shape: bool, ranks: int, tokens_per_step: int, epochs: int
) -> Batches:
    """Our plan, made by the code of stage bucket."""
    index = RowIndex(
        lengths=lengths,
        supervised=np.ones_like(lengths),
        sources=np.zeros(len(lengths), np.uint16),
        dropped=np.zeros(len(lengths), bool),
        weights=(1.0,),
    )
    cutting = MicroBatchSettings(
        mode=mode,  # type: ignore[arg-type]
        max_tokens=CAPACITY,
        pad_multiple=PAD_MULTIPLE,
        constant_shape=constant_shape,
        fixed_rows=ROWS_PER_BATCH,
        ranks=ranks,
    )
    settings = PlanSettings(
        micro_batches=cutting, seed=1, epochs=epochs, tokens_per_step=tokens_per_step, weights=(1.0,)
    )
    plan = settings.plan(index)
    return Batches(
        rows=plan.rows,
        bounds=plan.bounds,
        padded_tokens=plan.padded_tokens,
        step_bounds=plan.step_bounds,
        ranks=ranks,
    )


def grouped(orders: Sequence[Sequence[int]], lengths: np.ndarray, batches_per_step: int) -> Batches:
    """Complete steps of micro-batches of ROWS_PER_BATCH rows, in the order given."""
    rows_per_step = batches_per_step * ROWS_PER_BATCH
    rows = np.concatenate([np.array(order)[: len(order) // rows_per_step * rows_per_step] for order in orders])
    return _padded(rows, np.arange(0, len(rows) + 1, ROWS_PER_BATCH), lengths, batches_per_step)


def _padded(rows: np.ndarray, bounds: np.ndarray, lengths: np.ndarray, batches_per_step: int) -> Batches:
    """Micro-batches whose rows are padded to the longest row."""
    longest = np.maximum.reduceat(lengths[rows], bounds[:-1]).astype(np.int64)
    return Batches(
        rows=rows,
        bounds=bounds,
        padded_tokens=-(-longest // PAD_MULTIPLE) * PAD_MULTIPLE * np.diff(bounds),
        step_bounds=np.arange(0, len(bounds), batches_per_step),
    )


def random_order(lengths: np.ndarray, batches_per_step: int, epochs: int) -> Batches:
    """Shuffled rows."""
    orders = [torch.randperm(len(lengths), generator=_generator(epoch)).tolist() for epoch in range(epochs)]
    return grouped(orders, lengths, batches_per_step)


def group_by_length(lengths: np.ndarray, batches_per_step: int, epochs: int) -> Batches:
    """The sampler of the Trainer's train_sampling_strategy=group_by_length."""
    size = ROWS_PER_BATCH * batches_per_step // RANKS
    known = lengths.tolist()
    samplers = (LengthGroupedSampler(size, lengths=known, generator=_generator(epoch)) for epoch in range(epochs))
    return grouped([list(sampler) for sampler in samplers], lengths, batches_per_step)


def batch_rebalance(lengths: np.ndarray, batches_per_step: int, epochs: int) -> Batches:
    """The sampler of train_sampling_strategy=batch_rebalance, with as many tokens per step as ours."""
    rows_per_step = round(batches_per_step * CAPACITY / float(lengths.mean()))
    batches: list[list[int]] = []
    for epoch in range(epochs):
        by_rank = []
        for rank in range(RANKS):
            sampler = BatchRebalanceSampler(
                lengths.tolist(), rows_per_step, RANKS, batches_per_step // RANKS, seed=epoch, rank=rank
            )
            by_rank.append(list(sampler))
        batches += [batch for turn in zip(*by_rank, strict=True) for batch in turn]
    bounds = np.concatenate([[0], np.cumsum([len(batch) for batch in batches])])
    return _padded(np.concatenate([np.array(batch) for batch in batches]), bounds, lengths, batches_per_step)


def packed_by(rival: Rival, lengths: np.ndarray, batches_per_step: int, epochs: int) -> Batches:
    """Bins that a rival's own code fills, each padded to its capacity, in shuffled order."""
    with tempfile.TemporaryDirectory(prefix="lean-finetune-") as directory:
        source, out = Path(directory) / "lengths.npy", Path(directory) / "bins.npz"
        np.save(source, lengths)
        rival.run("pack_rows.py", rival.key, source, str(CAPACITY), out)
        with np.load(out) as bins:
            rows, bounds = bins["rows"], bins["bounds"]
    members = np.split(rows, bounds[1:-1])
    order: list[int] = []
    for epoch in range(epochs):
        shuffled = torch.randperm(len(members), generator=_generator(epoch)).tolist()
        order += shuffled[: len(shuffled) // batches_per_step * batches_per_step]
    chosen = [members[number] for number in order]
    return Batches(
        rows=np.concatenate(chosen),
        bounds=np.concatenate([[0], np.cumsum([len(one) for one in chosen])]),
        padded_tokens=np.full(len(chosen), CAPACITY),
        step_bounds=np.arange(0, len(chosen) + 1, batches_per_step),
    )


def _generator(seed: int) -> torch.Generator:
    """A new generator, so that no contestant's draws depend on another's."""
    return torch.Generator().manual_seed(seed)


def prepare_stage(directory: Path, lengths: np.ndarray, *, mode: str, ranks: int, tokens_per_step: int) -> None:
    """Write the input of stage bucket: params.yaml and an index of rows of these lengths."""
    (directory / "data/tokens").mkdir(parents=True, exist_ok=True)
    changes = {
        "data.max_length": int(lengths.max()),
        "bucket.mode": mode,
        "bucket.max_tokens": CAPACITY,
        "bucket.pad_multiple": PAD_MULTIPLE,
        "hardware.num_gpus": ranks,
        "train.sharding": "ddp" if ranks > 1 else "none",
        "train.epochs": 1,
        "train.tokens_per_step": tokens_per_step,
        "run.progress": False,
    }
    write_params(directory, changes)
    columns = [lengths, np.ones_like(lengths), np.zeros(len(lengths), np.uint16), np.zeros(len(lengths), bool)]
    arrays = [pa.array(values, types[0]) for values, types in zip(columns, COLUMNS.values(), strict=True)]
    batch = pa.record_batch(arrays, names=list(COLUMNS))
    with ArrowWriter(directory / "data/tokens/train-index.arrow", batch.schema) as writer:
        writer.write(batch)
