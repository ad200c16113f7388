"""The batch loader of stage train against a Hugging Face Dataset that reads the same shards.

Token files are generated in tokenize's format (log-normal lengths up to 4096), planned by stage bucket, and read with a
warm page cache in micro-batches of 16,384 tokens. Times are per 16,384 tokens, padding included. The rival fetches the
same rows in torch format, and our collation makes the same tensors of them, bit by bit. A resume opens shards, index
and plan again and makes the first batch of a random step.
"""

import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch

from benchmarks.harness import Bar, Measured, Row, at_least, at_most, benchmark, interleaved_seconds, median_ratio
from lean_finetune.core.arrow_files import ArrowWriter
from lean_finetune.data.shards.shard_files import INDEX_OPTIONS
from lean_finetune.plan.batch_plan import MicroBatch, Plan, read_plan, write_plan
from lean_finetune.plan.micro_batches import MicroBatchSettings, split_steps
from lean_finetune.plan.optimizer_steps import read_index, run_steps
from lean_finetune.step.batch_stream import load
from lean_finetune.step.batches import Batch, collate
from lean_finetune.step.token_rows import TokenRows

ROWS, QUICK_ROWS = 300_000, 3_000
BATCHES, QUICK_BATCHES = 200, 5
ROUNDS, QUICK_ROUNDS = 11, 1
RESUMES, QUICK_RESUMES = 40, 2
SEED = 5
MEAN_TOKENS, SIGMA, LONGEST = 314, 1.1, 4096
VOCABULARY_SIZE = 32_000
ROWS_PER_BLOCK, ROWS_PER_SHARD = 900, 64 * 900
"""Rows of about 1 MiB of chat text, and of the blocks of a shard of tokenize."""
BATCH_TOKENS, STEP_TOKENS, PAD_MULTIPLE, PAD_ID = 16_384, 131_072, 8, 0
MODES: tuple[Literal["bucketed", "packed"], ...] = ("bucketed", "packed")
HF = "Dataset, torch format"
MILLISECONDS_LIMIT = 0.5
RESUME_LIMIT = 50.0
TIMES_FASTER = 4.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Source:
    """A mode's plan, and the consecutive micro-batches of it that are read."""

    tokens: TokenRows
    plan: Plan
    path: Path
    """The plan's file."""
    start_step: int
    batches: int

    @property
    def micro_batches(self) -> list[MicroBatch]:
        """The micro-batches that are read."""
        steps = range(self.start_step, len(self.plan.steps))
        return list(islice((one for step in steps for one in self.plan.steps[step]), self.batches))

    @property
    def units(self) -> float:
        """Their padded tokens, in units of 16,384."""
        return sum(one.padded_tokens for one in self.micro_batches) / BATCH_TOKENS


def measure(quick: bool) -> Measured:
    """Write token files, plan, and time every way to read them."""
    rows, batches, rounds, resumes = (
        (QUICK_ROWS, QUICK_BATCHES, QUICK_ROUNDS, QUICK_RESUMES) if quick else (ROWS, BATCHES, ROUNDS, RESUMES)
    )
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        write_tokens(directory, rows)
        sources = {mode: plan_for(directory, mode, batches) for mode in MODES}
        dataset = open_dataset(directory)
        table: list[Row] = []
        bars: list[Bar] = []
        for mode, source in sources.items():
            cases: dict[str, Callable[[], Any]] = {
                **{f"ours, {threads} threads": partial(read, source, threads) for threads in (0, 1)},
                HF: partial(read_rival, dataset, source),
            }
            seconds = interleaved_seconds(cases, rounds)
            table += [_row(mode, name, seconds[name], seconds[HF], source) for name in cases]
            resume_ms = [1e3 * _resume_seconds(directory, source, step) for step in _random_steps(source, resumes)]
            table.append({"mode": mode, "what": "resume", "ms": median(resume_ms), "slowest_ms": max(resume_ms)})
            bars += _bars(mode, seconds, source, resume_ms) if not quick else []
            bars.append(_same_bytes(mode, source, dataset))
    return Measured(rows=table, bars=bars)


def write_tokens(directory: Path, rows: int) -> None:
    """Write training shards and their index in tokenize's format, with two trained spans per row."""
    draw = np.random.default_rng(SEED)
    centre = np.log(MEAN_TOKENS) - SIGMA**2 / 2
    lengths = np.clip(draw.lognormal(centre, SIGMA, rows), 8, LONGEST).astype(np.int32)
    edges = np.sort(draw.integers(1, lengths[:, None], (rows, 4)), axis=1).astype(np.int32)
    edges[:, -1] = lengths  # The last span ends the row, like an answer.
    edges[:, -2] = np.minimum(edges[:, -2], lengths - 1)
    edges[:, :-2] = np.minimum(edges[:, :-2], edges[:, -2:-1])
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    span_offsets = np.arange(0, edges.size + 1, 4, dtype=np.int32)
    ids = draw.integers(3, VOCABULARY_SIZE, offsets[-1], dtype=np.uint16)
    tokens = pa.table(
        {
            "input_ids": pa.ListArray.from_arrays(offsets, ids),
            "loss_spans": pa.ListArray.from_arrays(span_offsets, edges.reshape(-1).astype(np.uint16)),
            "family": pa.nulls(rows, pa.string()),
            "source_file": pa.array(np.zeros(rows, np.uint16)),
            "source_row": pa.array(np.arange(rows, dtype=np.uint32)),
        }
    )
    index = {
        "length": pa.array(lengths),
        "supervised": pa.array((edges[:, 1] - edges[:, 0] + edges[:, 3] - edges[:, 2]).astype(np.int32)),
        "source": pa.array(np.zeros(rows, np.uint16)),
        "dropped": pa.array(np.zeros(rows, bool)),
    }
    (directory / "train").mkdir()
    for shard, start in enumerate(range(0, rows, ROWS_PER_SHARD)):
        _write(directory / "train" / f"{shard:05}.arrow", tokens.slice(start, ROWS_PER_SHARD), ROWS_PER_BLOCK)
    _write(directory / "train-index.arrow", pa.table(index), rows, INDEX_OPTIONS)


def _write(path: Path, table: pa.Table, batch_rows: int, options: pa.ipc.IpcWriteOptions | None = None) -> None:
    """Write an Arrow IPC file with record batches of so many rows."""
    with ArrowWriter(path, table.schema, options) as writer:
        for batch in table.to_batches(max_chunksize=batch_rows):
            writer.write(batch)


def plan_for(directory: Path, mode: Literal["bucketed", "packed"], batches: int) -> Source:
    """Plan one epoch as stage bucket does, and choose consecutive micro-batches at random."""
    cutting = MicroBatchSettings(
        mode=mode,
        max_tokens=BATCH_TOKENS,
        pad_multiple=PAD_MULTIPLE,
        constant_shape=False,
        fixed_rows=1,
        ranks=1,
    )
    index = read_index(directory / "train-index.arrow", (1.0,))
    path = directory / f"{mode}.arrow"
    write_plan(path, split_steps(run_steps(index, seed=SEED, epochs=1, tokens_per_step=STEP_TOKENS), index, cutting))
    plan = read_plan(path)
    last = int(np.searchsorted(plan.step_bounds, len(plan) - batches, side="right")) - 1
    start_step = int(np.random.default_rng(SEED).integers(0, last + 1))
    return Source(tokens=TokenRows(directory, "train"), plan=plan, path=path, start_step=start_step, batches=batches)


def read(source: Source, threads: int) -> None:
    """Read the micro-batches as stage train does."""
    with closing(_ours(source, threads)) as stream:
        deque(islice(stream, source.batches), maxlen=0)


def read_rival(dataset: Any, source: Source) -> None:
    """Read the micro-batches through the Dataset."""
    deque(rival_batches(dataset, source), maxlen=0)


def _ours(source: Source, threads: int) -> Any:
    """Our batches from the first step on."""
    return load(source.tokens, source.plan, start_step=source.start_step, pad_id=PAD_ID, threads=threads)


def open_dataset(directory: Path) -> Any:
    """The same shards as a Hugging Face Dataset in torch format."""
    from datasets import disable_progress_bars, load_dataset

    disable_progress_bars()
    files = [str(path) for path in sorted((directory / "train").glob("*.arrow"))]
    dataset: Any = load_dataset("arrow", data_files=files, split="train", cache_dir=str(directory / "hf"))
    return dataset.select_columns(["input_ids", "loss_spans"]).with_format("torch")


def rival_batches(dataset: Any, source: Source) -> Iterator[Batch]:
    """The same batches, of rows that the Dataset fetches a batch at a time."""
    for one in source.micro_batches:
        found = dataset[one.rows.tolist()]
        pairs = zip(found["input_ids"], found["loss_spans"], strict=True)
        rows = [(ids.numpy(), spans.numpy().reshape(-1, 2)) for ids, spans in pairs]
        yield collate(rows, one.length, PAD_ID, flat=one.flat)


def _random_steps(source: Source, count: int) -> list[int]:
    """Random steps to resume at."""
    return np.random.default_rng(SEED + 1).integers(0, len(source.plan.steps), count).tolist()


def _resume_seconds(directory: Path, source: Source, step: int) -> float:
    """Seconds to open everything and make the first batch of a step."""
    start = time.perf_counter()
    next(load(TokenRows(directory, "train"), read_plan(source.path), start_step=step, pad_id=PAD_ID))
    return time.perf_counter() - start


def _row(mode: str, name: str, seconds: list[float], rival: list[float], source: Source) -> Row:
    """One line of the table."""
    unit_ms = 1e3 * median(seconds) / source.units
    return {
        "mode": mode,
        "what": name,
        "ms": unit_ms,
        "million_tokens_per_s": BATCH_TOKENS / unit_ms / 1e3,
        "times_faster": median_ratio(rival, seconds),
    }


def _bars(mode: str, seconds: Mapping[str, list[float]], source: Source, resume_ms: list[float]) -> list[Bar]:
    """Bars of speed."""
    ours = seconds["ours, 0 threads"]
    unit_ms = 1e3 * median(ours) / source.units
    faster = median_ratio(seconds[HF], ours)
    return [
        at_most(f"{mode}: ms per {BATCH_TOKENS} tokens", unit_ms, MILLISECONDS_LIMIT),
        at_least(f"{mode}: {HF} / ours", faster, TIMES_FASTER),
        at_most(f"{mode}: ms to resume, median", median(resume_ms), RESUME_LIMIT),
    ]


def _same_bytes(mode: str, source: Source, dataset: Any) -> Bar:
    """Bar: threads, a resume from the middle and the rival give the batches of an uninterrupted run."""
    wanted = [_contents(batch) for batch in rival_batches(dataset, source)]
    ways = {threads: [_contents(one) for one in islice(_ours(source, threads), source.batches)] for threads in (0, 1)}
    skipped = sum(len(source.plan.steps[step]) for step in range(source.start_step))
    uninterrupted = load(source.tokens, source.plan, pad_id=PAD_ID, threads=1)
    with closing(uninterrupted):
        run = [_contents(one) for one in islice(uninterrupted, skipped, skipped + source.batches)]
    same = all(_equal(found, wanted) for found in (*ways.values(), run))
    return at_least(f"{mode}: same bits by threads, resume and Dataset", float(same), 1)


def _contents(batch: Batch) -> tuple[torch.Tensor, ...]:
    """The tensors of a batch."""
    joined = batch.packed_rows
    positions = () if joined is None else (joined.offsets, joined.positions_BT)
    return batch.input_ids_BT, batch.targets_BT, batch.supervised_index_N, *positions


def _equal(found: list[tuple[torch.Tensor, ...]], wanted: list[tuple[torch.Tensor, ...]]) -> bool:
    """Whether two lists of batches are equal bit by bit."""
    if len(found) != len(wanted):
        return False
    pairs = zip(found, wanted, strict=True)
    return all(all(map(torch.equal, one, other)) for one, other in pairs)


if __name__ == "__main__":
    benchmark("loader", measure)()
