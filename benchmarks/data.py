"""Stage tokenize against the tokenizer alone, datasets.map, TRL and LLaMA-Factory, on one generated chat file.

Contestants run interleaved, each in a new process with an empty cache. One more run of each measures memory, untimed.
`work_s` leaves out the start of the interpreter and imports on every side, since the raw limit is timed inside a
running process. `wall_s` has everything.

All make the same tokens, with two exceptions: we leave out the line end after the last answer (one token a row), and
LLaMA-Factory's reader leaves out tool calls. TRL and LLaMA-Factory run in virtual environments below scratch/bench.
--quick: few rows and no rivals.
"""

import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import click
import pyarrow as pa

from benchmarks.chat_file import ChatFile, chat_file
from benchmarks.harness import Bar, Measured, Row, at_least, at_most, benchmark, interleaved, median_ratio
from benchmarks.processes import DATASETS_MAP, LLAMA_FACTORY, SCRATCH, TRL, Finished, Rival, run, run_stage
from lean_finetune.core.atomic_files import sha256_file
from tests.kit.write_params import write_params

ROWS, QUICK_ROWS = 100_000, 1_000
QUICK_TRAINING_ROWS = 500
"""Rows that train the tokenizer of a quick run: 2 s instead of 8."""
ROUNDS, QUICK_ROUNDS = 5, 1
WORKERS = 2
NO_LIMIT = (1 << 16) - 1
"""data.max_length, longer than any row: no row is truncated, so all contestants make the same tokens."""
RAW, HF, FAST, START = "raw limit", "ours, tokenizers", "ours, tiktoken", "(our start and imports)"
ENGINES = {HF: "tokenizers", FAST: "tiktoken"}
RAW_LIMIT = Rival(name=RAW, key="raw_limit")
RIVALS = (DATASETS_MAP, TRL, LLAMA_FACTORY)
LIMITS = {HF: 1.12, FAST: 0.45}
TIMES_FASTER = {HF: 2.0, FAST: 5.0}
ANONYMOUS_LIMIT_BYTES = 250e6
GROWTH_LIMIT = 1.05
"""Growth of anonymous memory when the input doubles."""
BYTES_PER_TOKEN_LIMIT = 2.1


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a contestant."""

    wall_s: float
    """From the start of its process to its end."""
    work_s: float
    """Without the start of the interpreter and its imports."""
    rows: int
    tokens: int
    written_bytes: int
    peak_rss_bytes: int = 0
    """Summed over its processes; 0 in a timed run."""
    anonymous_bytes: int = 0

    @classmethod
    def of(cls, finished: Finished, figures: Mapping[str, Any], written_bytes: int = 0) -> "Run":
        """The process with the figures that it printed or that its files have."""
        usage = finished.usage
        return cls(
            wall_s=finished.wall_s,
            written_bytes=written_bytes,
            peak_rss_bytes=usage.peak_rss_bytes if usage else 0,
            anonymous_bytes=usage.peak_anonymous_bytes if usage else 0,
            **{"work_s": finished.wall_s, **figures},
        )


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Stage tokenize as users run it, in its own directory with params.yaml and locks."""

    source: ChatFile
    engine: str

    @property
    def directory(self) -> Path:
        """Its working directory."""
        return SCRATCH / "runs" / f"stage-{self.engine}-{self.source.rows}"

    @property
    def tokens(self) -> Path:
        """The directory of token files that it writes."""
        return self.directory / "data/tokens"

    def prepare(self) -> None:
        """Write params.yaml, and run the pin stages for the file and the tokenizer."""
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir(parents=True)
        changes = {
            "model.name": str(self.source.model.resolve()),
            "data.source": str(self.source.path.resolve()),
            "data.max_length": NO_LIMIT,
            "bucket.max_tokens": NO_LIMIT + 1,  # At least the longest row that may come.
            "evaluate.max_tokens": NO_LIMIT + 1,
            "run.progress": False,
            "run.data_workers": WORKERS,
            "run.tokenizer_engine": self.engine,
        }
        write_params(self.directory, changes)
        for stage in ("pin data", "pin model"):
            run_stage(stage, self.directory)

    def run(self, watched: bool = False) -> Run:
        """Tokenize without earlier outputs. `work_s` equals `wall_s` until `without_start` subtracts the imports."""
        for name in ("data", "metrics", "scratch"):
            shutil.rmtree(self.directory / name, ignore_errors=True)
        finished = run_stage("tokenize", self.directory, watched=watched)
        counts = [_count(file) for file in sorted(self.tokens.rglob("*.arrow")) if file.parent != self.tokens]
        figures = {"rows": sum(rows for rows, _ in counts), "tokens": sum(tokens for _, tokens in counts)}
        return Run.of(finished, figures, _size(self.tokens))


def run_rival(rival: Rival, source: ChatFile, watched: bool = False) -> Run:
    """Let a rival prepare the file with an empty cache."""
    out = SCRATCH / "runs" / rival.key
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    try:
        arguments = [path.resolve() for path in (source.path, source.model, out)]
        finished = rival.run("prepare_chat.py", rival.key, *arguments, str(WORKERS), watched=watched, cache=out)
        return Run.of(finished, finished.figures, _size(out))
    finally:
        shutil.rmtree(out)


def start_of_stage() -> Run:
    """Start the interpreter and import stage tokenize, nothing else."""
    return Run.of(run([sys.executable, "-c", "import stages.tokenize"]), {"rows": 0, "tokens": 0})


def without_start(runs: Sequence[Run], starts: Sequence[Run]) -> list[Run]:
    """The stage's runs, with the start that was measured in the same round subtracted from `work_s`."""
    return [replace(each, work_s=each.wall_s - start.wall_s) for each, start in zip(runs, starts, strict=True)]


def measure(quick: bool) -> Measured:
    """Run every contestant on the file, and ours also on one with twice the rows."""
    rows, rounds = (QUICK_ROWS, QUICK_ROUNDS) if quick else (ROWS, ROUNDS)
    training_rows = QUICK_TRAINING_ROWS if quick else None
    source, double = (chat_file(count, training_rows=training_rows) for count in (rows, 2 * rows))
    ours = {name: Stage(source=source, engine=engine) for name, engine in ENGINES.items()}
    ours_double = {name: Stage(source=double, engine=engine) for name, engine in ENGINES.items()}
    for stage in (*ours.values(), *ours_double.values()):
        stage.prepare()
    rivals, skipped = ready_rivals(() if quick else RIVALS)
    cases = {
        RAW: partial(run_rival, RAW_LIMIT, source),
        **{name: stage.run for name, stage in ours.items()},
        **{rival.name: partial(run_rival, rival, source) for rival in rivals},
    }
    watched = {name: case(watched=True) for name, case in cases.items()}
    watched_double = {name: stage.run(watched=True) for name, stage in ours_double.items()}
    runs = interleaved({**cases, START: start_of_stage}, rounds, warm_up=False)
    for name in ours:
        runs[name] = without_start(runs[name], runs[START])
    table = [_row(name, runs[name], watched[name], runs[RAW]) for name in cases]
    for name, each in watched_double.items():  # Memory alone: nothing was timed there.
        table.append({"what": f"{name}, input doubled", "rows": each.rows, "tokens": each.tokens, **_memory(each)})
    table.append({"what": START, "wall_s": round(median(each.wall_s for each in runs[START]), 3)})
    table += [{"what": name, "skipped": reason} for name, reason in skipped.items()]
    bars = [same_bytes(ours)]
    if not quick:  # Few rows have larger overheads.
        bars += [_size_bar(watched[HF]), *_speed_bars(runs), *_memory_bars(watched, watched_double)]
    return Measured(rows=table, bars=bars)


def ready_rivals(rivals: Sequence[Rival]) -> tuple[list[Rival], dict[str, str]]:
    """(rivals that can run, reason by name for those that cannot be installed)."""
    skipped = {rival.name: reason for rival in rivals if (reason := rival.prepare())}
    for name, reason in skipped.items():
        click.echo(f"note: {name} is skipped: {reason}", err=True)
    return [rival for rival in rivals if rival.name not in skipped], skipped


def _row(name: str, runs: Sequence[Run], watched: Run, raw: Sequence[Run]) -> Row:
    """A contestant's row: medians over the rounds, memory from the watched run."""
    work_s, first = median(each.work_s for each in runs), runs[0]
    row: dict[str, Any] = {
        "what": name,
        "rows": first.rows,
        "work_s": round(work_s, 3),
        "wall_s": round(median(each.wall_s for each in runs), 3),
        "of raw limit": round(_ratio(runs, raw), 3),
        "rows/s": round(first.rows / work_s),
        "tokens/s": round(first.tokens / work_s),
        "tokens": first.tokens,
        "rounds": len(runs),
    }
    # The raw limit has all text in memory and writes nothing, so its memory has no meaning.
    if name != RAW:
        bytes_per_token = round(first.written_bytes / first.tokens, 3)
        row |= {**_memory(watched), "written_bytes": first.written_bytes, "bytes/token": bytes_per_token}
    return row


def _memory(watched: Run) -> dict[str, int]:
    """Peaks of a watched run, summed over its processes."""
    return {"anonymous_bytes": watched.anonymous_bytes, "peak_rss_bytes": watched.peak_rss_bytes}


def _ratio(runs: Sequence[Run], base: Sequence[Run]) -> float:
    """Median over rounds of the ratio of `work_s`."""
    return median_ratio([each.work_s for each in runs], [each.work_s for each in base])


def same_bytes(ours: Mapping[str, Stage]) -> Bar:
    """Bar: no file differs between the two engines."""
    one, other = (
        {str(path.relative_to(stage.tokens)): sha256_file(path) for path in stage.tokens.rglob("*") if path.is_file()}
        for stage in ours.values()
    )
    differing = sum(one.get(name) != other.get(name) for name in one.keys() | other.keys())
    return at_most(f"files of {len(one)} that differ between the engines", differing, 0)


def _size_bar(watched: Run) -> Bar:
    """Bar: bytes on disk per token, with everything in data/tokens."""
    value = round(watched.written_bytes / watched.tokens, 3)
    return at_most("bytes per token, data/tokens", value, BYTES_PER_TOKEN_LIMIT)


def _speed_bars(runs: Mapping[str, Sequence[Run]]) -> list[Bar]:
    """Ours against the raw limit and against the rivals that ran."""
    bars = [
        at_most(f"{name} / {RAW}", round(_ratio(runs[name], runs[RAW]), 3), limit) for name, limit in LIMITS.items()
    ]
    bars += [
        at_least(f"{rival} / {name}", round(_ratio(runs[rival], runs[name]), 2), limit)
        for rival in (TRL.name, LLAMA_FACTORY.name)
        if rival in runs
        for name, limit in TIMES_FASTER.items()
    ]
    return bars


def _memory_bars(watched: Mapping[str, Run], watched_double: Mapping[str, Run]) -> list[Bar]:
    """Anonymous memory, and its growth with the input."""
    bars = []
    for name in ENGINES:
        single, double = watched[name].anonymous_bytes, watched_double[name].anonymous_bytes
        for what, value, limit in (
            ("anonymous memory, MB", round(single / 1e6, 1), ANONYMOUS_LIMIT_BYTES / 1e6),
            ("the same, input doubled", round(double / single, 3), GROWTH_LIMIT),
        ):
            bars.append(at_most(f"{name}: {what}", value, limit))
    return bars


def _count(shard: Path) -> tuple[int, int]:
    """(rows, tokens) of a shard."""
    with pa.memory_map(str(shard)) as source, pa.ipc.open_file(source) as reader:
        batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
    return sum(map(len, batches)), sum(len(batch.column("input_ids").flatten()) for batch in batches)


def _size(directory: Path) -> int:
    """Bytes of all files below a directory."""
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file() and not file.is_symlink())


if __name__ == "__main__":
    benchmark("data", measure)()
