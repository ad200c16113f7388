"""Micro-batches from row lengths: stage bucket against random order, transformers' samplers, TRL and LLaMA-Factory.

All contestants get the token lengths of one generated chat file, at most 4,096, for 8 GPUs, and are compared by the
same figures: padding, waiting for the largest micro-batch of a turn, the largest micro-batch, and how random the steps
are (1 = like independent draws). Bins of TRL and LLaMA-Factory count as padded to their capacity, as in our packed mode
of one shape. Then the stage itself plans ten million rows in its own process.
--quick: fewer rows, and no contestant that needs a virtual environment.
"""

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks import batching_cases as cases
from benchmarks.batching_cases import CAPACITY, RANKS
from benchmarks.chat_file import lengths
from benchmarks.data import ready_rivals
from benchmarks.harness import Bar, Measured, Row, at_least, at_most, benchmark
from benchmarks.processes import LLAMA_FACTORY, SCRATCH, TRL, run_stage

ROWS, QUICK_ROWS = 100_000, 5_000
EPOCHS, QUICK_EPOCHS = 8, 2
"""More than one, so that randomness is known to a few percent."""
PLANNED_ROWS, QUICK_PLANNED_ROWS = 10_000_000, 200_000
PLAN_ROUNDS = 3
MAX_LENGTH = 4096
STEP_BATCHES = 32
"""Micro-batches per optimizer step: 4 for each of 8 GPUs. Packed is measured with 8 too."""
PADDING_SHARE = 0.07
"""Share of a step's capacity that bucketed needs for padding."""
UNFILLED_TOKENS = 1600
"""Unused tokens of a packed step, since the row that reaches train.tokens_per_step may end after it."""
PADDING_LIMITS = {("bucketed", 32): 7.0, ("packed", 32): 0.5, ("packed", 8): 1.5}
STRAGGLER_LIMIT = 1.5
RANDOMNESS = (0.9, 1.1)
PLAN_LIMIT_S, PLAN_LIMIT_BYTES = 5.0, 2 << 30
OURS = (
    ("bucketed", False, 1, 32),
    ("bucketed", False, RANKS, 32),
    ("packed", False, RANKS, 32),
    ("packed", False, RANKS, 8),
    ("packed", True, 1, 32),
    ("packed", True, 1, 8),
    ("fixed", False, RANKS, 32),
)
"""Our contestants: bucket.mode, bucket.constant_shape, GPUs, micro-batches per step."""


def measure(quick: bool) -> Measured:
    """Let every contestant make micro-batches of the same lengths, then time the stage."""
    rows, epochs = (QUICK_ROWS, QUICK_EPOCHS) if quick else (ROWS, EPOCHS)
    known = np.minimum(lengths(rows), MAX_LENGTH)
    table: list[Row] = []
    bars: list[Bar] = []
    for mode, constant_shape, ranks, batches in OURS:
        name = f"ours, {mode}{', one shape' * constant_shape}, {_gpus(ranks)}, {batches} per step"
        step = _tokens_per_step(mode, batches)
        own = cases.ours(
            known, mode=mode, constant_shape=constant_shape, ranks=ranks, tokens_per_step=step, epochs=epochs
        )
        figures = own.figures(known)
        table.append({"what": name, **figures})
        if mode != "fixed":
            bars += mode_bars(name, (mode, batches), figures, few_steps=quick)
    for name, make in {
        "random order, 8 rows": cases.random_order,
        "transformers group_by_length, 8 rows": cases.group_by_length,
        "transformers batch_rebalance": cases.batch_rebalance,
    }.items():
        table.append({"what": name, **make(known, STEP_BATCHES, epochs).figures(known)})
    if not quick:
        table += _packed_by_rivals(known, epochs)
    planned, plan_bars = _planning(QUICK_PLANNED_ROWS if quick else PLANNED_ROWS, known)
    return Measured(rows=table + planned, bars=bars + ([] if quick else plan_bars))


def _gpus(ranks: int) -> str:
    """`1 GPU`, `8 GPUs`."""
    return "1 GPU" if ranks == 1 else f"{ranks} GPUs"


def _tokens_per_step(mode: str, batches: int) -> int:
    """Tokens that fill `batches` micro-batches."""
    free = UNFILLED_TOKENS if mode == "packed" else round(PADDING_SHARE * batches * CAPACITY)
    return batches * CAPACITY - free


def _packed_by_rivals(known: np.ndarray, epochs: int) -> list[Row]:
    """Rows of the contestants with virtual environments, or the reason why one cannot be installed."""
    ready, skipped = ready_rivals((TRL, LLAMA_FACTORY))
    table: list[Row] = []
    for rival in ready:
        batches = cases.packed_by(rival, known, STEP_BATCHES, epochs)
        table.append({"what": f"{rival.name} packing", **batches.figures(known)})
    return table + [{"what": name, "skipped": reason} for name, reason in skipped.items()]


def mode_bars(name: str, case: tuple[str, int], figures: Mapping[str, Any], *, few_steps: bool) -> list[Bar]:
    """Bars of one of our modes. With few steps, only the largest micro-batch is meaningful."""
    low, high = RANDOMNESS
    found = [at_most(f"{name}: largest micro-batch", figures["largest_tokens"], CAPACITY)]
    if few_steps:
        return found
    found += [
        at_most(f"{name}: straggler %", figures["straggler_percent"], STRAGGLER_LIMIT),
        at_least(f"{name}: randomness", figures["randomness"], low),
        at_most(f"{name}: randomness", figures["randomness"], high),
    ]
    if limit := PADDING_LIMITS.get(case):
        found.append(at_most(f"{name}: padding %", figures["padding_percent"], limit))
    return found


def _planning(rows: int, known: np.ndarray) -> tuple[list[Row], list[Bar]]:
    """Time and memory of stage bucket as a process, for lengths drawn from the file's."""
    drawn = np.random.default_rng(1).choice(known, rows)
    table: list[Row] = []
    for mode in ("bucketed", "packed"):
        for ranks in (1, RANKS):
            tokens_per_step = _tokens_per_step(mode, STEP_BATCHES)
            directory: Path = SCRATCH / "runs" / f"bucket-{mode}-{ranks}"
            cases.prepare_stage(directory, drawn, mode=mode, ranks=ranks, tokens_per_step=tokens_per_step)
            usage = run_stage("bucket", directory, watched=True).usage
            assert usage is not None
            wall_s = median(run_stage("bucket", directory).wall_s for _ in range(PLAN_ROUNDS))
            what = f"(stage bucket: {rows:,} rows, {mode}, {_gpus(ranks)})"
            table.append({"what": what, "wall_s": round(wall_s, 2), "peak_rss_bytes": usage.peak_rss_bytes})
    slowest = max(row["wall_s"] for row in table)
    largest = max(row["peak_rss_bytes"] for row in table)
    return table, [
        at_most(f"planning {rows:,} rows, seconds", slowest, PLAN_LIMIT_S),
        at_most(f"planning {rows:,} rows, peak bytes", largest, PLAN_LIMIT_BYTES),
    ]


if __name__ == "__main__":
    benchmark("batching", measure)()
