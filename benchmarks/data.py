"""Stage tokenize against the tokenizer's raw limit, datasets.map, TRL and LLaMA-Factory, on one generated chat file.

Cases run interleaved, each in fresh processes with an empty cache, after one run of each in which memory is watched and
time is not. `work_s` leaves out interpreter start and imports, on every side: the raw limit is timed inside a running
process, so a ratio to it must not hold our start against us, nor theirs against the rivals. `wall_s` holds everything.

All make the same tokens, but that ours leaves out the line end behind the last answer, one token a row, as nothing is
learnt from it, and that LLaMA-Factory's reader leaves out tool calls. TRL and LLaMA-Factory get virtual environments of
their own under scratch/bench. --quick: few rows and no rivals.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import click

from benchmarks.chat_file import chat_file
from benchmarks.data_cases import Rival, Run, Stage, start_of_stage, without_start
from benchmarks.form import Bar, Measured, Row, benchmark, interleaved, median_ratio
from lean_finetune.core.atomic_files import sha256_file

ROWS, QUICK_ROWS = 100_000, 1_000
QUICK_TRAINING_ROWS = 500
"""Of the tokenizer in a quick run, which is trained in 2 s instead of 8."""
ROUNDS, QUICK_ROUNDS = 5, 1
RAW, HF, FAST, START = "raw limit", "ours, tokenizers", "ours, tiktoken", "(our start and imports)"
TRL, LLAMA_FACTORY = "TRL 1.16.0", "LLaMA-Factory 0.9.5"
ENGINES = {HF: "tokenizers", FAST: "tiktoken"}
RIVALS = (
    Rival(name="datasets.map", script="datasets_map.py"),
    Rival(
        name=TRL,
        script="trl_sft.py",
        requirements=("torch==2.13.0", "trl==1.16.0", "transformers==5.23.0", "tokenizers==0.23.3", "datasets==5.2.0"),
    ),
    # It imports torchaudio, whose last release is 2.11.0 and loads beside the torch of that version alone.
    Rival(
        name=LLAMA_FACTORY,
        script="llama_factory.py",
        requirements=("torch==2.11.0", "torchvision==0.26.0", "torchaudio==2.11.0", "llamafactory==0.9.5"),
    ),
)
LIMITS = {HF: 1.12, FAST: 0.45}
TIMES_FASTER = {HF: 2.0, FAST: 5.0}
ANONYMOUS_LIMIT_BYTES = 250e6
GROWTH_LIMIT = 1.05
"""Of anonymous memory when the input doubles."""
BYTES_PER_TOKEN_LIMIT = 2.1


def measure(quick: bool) -> Measured:
    """Run every contestant on the file, ours also on one of twice the rows.

    Raises:
        UserError: a contestant failed.
    """
    rows, rounds = (QUICK_ROWS, QUICK_ROUNDS) if quick else (ROWS, ROUNDS)
    training_rows = QUICK_TRAINING_ROWS if quick else None
    source, double = (chat_file(count, training_rows=training_rows) for count in (rows, 2 * rows))
    ours = {name: Stage(source=source, engine=engine) for name, engine in ENGINES.items()}
    ours_double = {name: Stage(source=double, engine=engine) for name, engine in ENGINES.items()}
    for stage in (*ours.values(), *ours_double.values()):
        stage.prepare()
    rivals, skipped = _rivals(quick)
    cases = {
        RAW: partial(Rival(name=RAW, script="raw_limit.py").run, source),
        **{name: stage.run for name, stage in ours.items()},
        **{rival.name: partial(rival.run, source) for rival in rivals},
    }
    watched = {name: case(watched=True) for name, case in cases.items()}
    watched_double = {name: stage.run(watched=True) for name, stage in ours_double.items()}
    runs = interleaved({**cases, START: start_of_stage}, rounds, warm_up=False)
    for name in ours:
        runs[name] = without_start(runs[name], runs[START])
    table = [_row(name, runs[name], watched[name], runs[RAW]) for name in cases]
    table += [_double_row(name, run) for name, run in watched_double.items()]
    table.append({"what": START, "wall_s": round(median(run.wall_s for run in runs[START]), 3)})
    table += [{"what": name, "skipped": reason} for name, reason in skipped.items()]
    bars = [_same_bytes(ours), *_size_bars(watched)]
    if not quick:
        bars += [*_speed_bars(runs), *_memory_bars(watched, watched_double)]
    return Measured(rows=table, bars=bars)


def _rivals(quick: bool) -> tuple[list[Rival], dict[str, str]]:
    """(rivals that can run, reason by name of those that cannot)."""
    if quick:
        return [], {}
    ready, skipped = [], {}
    for rival in RIVALS:
        if reason := rival.prepare():
            click.echo(f"note: {rival.name} is skipped: {reason}", err=True)
            skipped[rival.name] = reason
        else:
            ready.append(rival)
    return ready, skipped


def _row(name: str, runs: Sequence[Run], watched: Run, raw: Sequence[Run]) -> Row:
    """A contestant's line: medians over the rounds, memory from the watched run."""
    work_s, first = median(run.work_s for run in runs), runs[0]
    row: dict[str, Any] = {
        "what": name,
        "rows": first.rows,
        "work_s": round(work_s, 3),
        "wall_s": round(median(run.wall_s for run in runs), 3),
        "of raw limit": round(_ratio(runs, raw), 3),
        "rows/s": round(first.rows / work_s),
        "tokens/s": round(first.tokens / work_s),
        "tokens": first.tokens,
        "rounds": len(runs),
    }
    # The raw limit holds all text in memory and writes nothing, so its memory says nothing.
    if name != RAW:
        row |= _memory(watched) | {
            "written_bytes": first.written_bytes,
            "bytes/token": round(first.written_bytes / first.tokens, 3),
        }
    return row


def _double_row(name: str, run: Run) -> Row:
    """Ours on twice the rows: memory alone, since nothing was timed there."""
    return {"what": f"{name}, input doubled", "rows": run.rows, "tokens": run.tokens, **_memory(run)}


def _memory(run: Run) -> dict[str, int]:
    """Peaks of a watched run over all its processes."""
    return {"anonymous_bytes": run.anonymous_bytes, "peak_rss_bytes": run.peak_rss_bytes}


def _ratio(runs: Sequence[Run], base: Sequence[Run]) -> float:
    """Median over rounds of the seconds of work."""
    return median_ratio([run.work_s for run in runs], [run.work_s for run in base])


def _same_bytes(ours: Mapping[str, Stage]) -> Bar:
    """Files of the whole corpus that differ between the engines."""
    digests = []
    for stage in ours.values():
        root = stage.tokens
        digests.append({str(path.relative_to(root)): sha256_file(path) for path in root.rglob("*") if path.is_file()})
    one, other = digests
    differing = sum(one.get(name) != other.get(name) for name in one.keys() | other.keys())
    return Bar(name=f"files of {len(one)} that differ between the engines", value=differing, rule="<=", limit=0)


def _size_bars(watched: Mapping[str, Run]) -> list[Bar]:
    """What a token takes on disk, everything in data/tokens counted."""
    run = watched[HF]
    value = round(run.written_bytes / run.tokens, 3)
    return [Bar(name="bytes per token, data/tokens", value=value, rule="<=", limit=BYTES_PER_TOKEN_LIMIT)]


def _speed_bars(runs: Mapping[str, Sequence[Run]]) -> list[Bar]:
    """Ours against the raw limit and against the rivals that ran."""
    bars = [
        Bar(name=f"{name} / {RAW}", value=round(_ratio(runs[name], runs[RAW]), 3), rule="<=", limit=limit)
        for name, limit in LIMITS.items()
    ]
    bars += [
        Bar(name=f"{rival} / {name}", value=round(_ratio(runs[rival], runs[name]), 2), rule=">=", limit=limit)
        for rival in (TRL, LLAMA_FACTORY)
        if rival in runs
        for name, limit in TIMES_FASTER.items()
    ]
    return bars


def _memory_bars(watched: Mapping[str, Run], watched_double: Mapping[str, Run]) -> list[Bar]:
    """Anonymous memory, and its growth with the input."""
    bars = []
    for name in ENGINES:
        single, double = watched[name].anonymous_bytes, watched_double[name].anonymous_bytes
        bars.append(
            Bar(
                name=f"{name}: anonymous memory, MB",
                value=round(single / 1e6, 1),
                rule="<=",
                limit=ANONYMOUS_LIMIT_BYTES / 1e6,
            )
        )
        bars.append(
            Bar(name=f"{name}: the same, input doubled", value=round(double / single, 3), rule="<=", limit=GROWTH_LIMIT)
        )
    return bars


main = benchmark("data", measure)

if __name__ == "__main__":
    main()
