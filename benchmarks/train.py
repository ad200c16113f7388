"""Stage train against Hugging Face's Trainer, TRL's SFTTrainer, and the bare forward and backward passes.

A small Llama of random weights (5 M parameters, 1,280 tokens) is fully fine-tuned in fp32 on the same made-up rows
of prompt and completion, of which the completion alone is trained, with about the same tokens in each optimizer step.
Cases run interleaved, each in fresh processes; the first steps of each are left out. The limit runs the very batches of
ours. Peak memory is that of PyTorch's allocator, counted in a run of its own. TRL gets the virtual environment of
benchmarks.data. --quick: few steps, no TRL.
"""

import math
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

import click

from benchmarks.form import Bar, Measured, Row, benchmark, interleaved, median_ratio
from benchmarks.train_cases import Field, Steps, TrainerCase, trl

ROWS, QUICK_ROWS = 260, 200
ROUNDS, QUICK_ROUNDS = 5, 1
TOKENS_PER_STEP, MAX_TOKENS = 2048, 1024
WARM_UP_STEPS = 2
"""Left out of each process: pages are first touched, kernels first chosen."""
MEMORY_STEPS = 8
"""In which a rival's peak is counted."""
TRL_BATCH_ROWS = 8
"""TRL's default."""
OURS, LIMIT, HF = "ours", "forward + backward alone", "transformers Trainer"
TRL_DEFAULT, TRL_LENGTH, TRL_PACKED = "TRL, its defaults", "TRL, group_by_length", "TRL, packing"
OVERHEAD_LIMIT = 1.03
FASTER_THAN_DEFAULT, FASTER_THAN_BEST = 1.3, 1.05
PEAK_OF_DEFAULT = 0.7


def measure(quick: bool) -> Measured:
    """Run every contestant.

    Raises:
        UserError: a contestant failed.
    """
    ground = Field(rows=QUICK_ROWS if quick else ROWS, tokens_per_step=TOKENS_PER_STEP, max_tokens=MAX_TOKENS)
    ground.prepare()
    ours = ground.ours()
    rows_per_step = round(TOKENS_PER_STEP * len(ours.real) / sum(ours.real) * _rows_of(ground) / len(ours.real))
    rivals, skipped = _rivals(quick, rows_per_step)
    steps = len(ours.seconds)
    peaks = {OURS: ours.peak_bytes}
    peaks |= {name: case.run(ground, min(steps, MEMORY_STEPS), memory=True).peak_bytes for name, case in rivals.items()}
    cases: dict[str, Any] = {OURS: ground.ours, LIMIT: ground.forward_backward}
    cases |= {name: partial(case.run, ground, steps, False) for name, case in rivals.items()}
    runs = interleaved(cases, QUICK_ROUNDS if quick else ROUNDS, warm_up=False)
    overheads = [_overhead(run, limit) for run, limit in zip(runs[OURS], runs[LIMIT], strict=True)]
    speeds = {name: [_supervised_per_second(run) for run in runs[name]] for name in cases if name != LIMIT}
    table = [_row(name, runs[name], peaks[name], speeds) for name in speeds]
    table.append({"what": LIMIT, "of the limit": 1.0})
    table[0] = {**table[0], "of the limit": round(median(overheads), 3)}
    table += [{"what": name, "skipped": reason} for name, reason in skipped.items()]
    bars = [Bar(name="ours / forward + backward", value=round(median(overheads), 3), rule="<=", limit=OVERHEAD_LIMIT)]
    if TRL_DEFAULT in speeds:
        bars += _trl_bars(speeds, peaks)
    return Measured(rows=table, bars=bars)


def _rows_of(ground: Field) -> int:
    """Training rows."""
    with open(ground.directory / "tokenized.jsonl", encoding="utf-8") as file:
        return sum(1 for _ in file)


def _rivals(quick: bool, rows_per_step: int) -> tuple[dict[str, TrainerCase], dict[str, str]]:
    """(cases by name, reason by name of those that cannot run)."""
    accumulated = max(1, round(rows_per_step / TRL_BATCH_ROWS))
    batch = {"per_device_train_batch_size": TRL_BATCH_ROWS, "gradient_accumulation_steps": accumulated}
    cases = {HF: TrainerCase(trainer="hf", arguments=batch)}
    if quick:
        return cases, {}
    if reason := trl().prepare():
        click.echo(f"note: TRL is skipped: {reason}", err=True)
        return cases, {TRL_DEFAULT: reason}
    plain = {**batch, "gradient_checkpointing": False}
    packed = {"packing": True, "max_length": MAX_TOKENS, "gradient_checkpointing": False}
    cases[TRL_DEFAULT] = TrainerCase(trainer="trl", arguments=batch)
    cases[TRL_LENGTH] = TrainerCase(trainer="trl", arguments={**plain, "train_sampling_strategy": "group_by_length"})
    cases[TRL_PACKED] = TrainerCase(
        trainer="trl",
        arguments={
            **packed,
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": TOKENS_PER_STEP // MAX_TOKENS,
        },
    )
    return cases, {}


def _timed(run: Steps) -> list[int]:
    """The steps whose seconds count."""
    return [n for n in range(WARM_UP_STEPS, len(run.seconds)) if not math.isnan(run.seconds[n])]


def _supervised_per_second(run: Steps) -> float:
    """Trained tokens a second."""
    steps = _timed(run)
    return sum(run.supervised[n] for n in steps) / sum(run.seconds[n] for n in steps)


def _overhead(run: Steps, limit: Sequence[float]) -> float:
    """Ours as a multiple of the limit, over the same steps."""
    steps = _timed(run)
    return sum(run.seconds[n] for n in steps) / sum(limit[n] for n in steps)


def _row(name: str, runs: Sequence[Steps], peak_bytes: int | None, speeds: dict[str, list[float]]) -> Row:
    """A contestant's line."""
    counted = [n for n in range(len(runs[0].padded)) if runs[0].padded[n]]
    padded, real = sum(runs[0].padded[n] for n in counted), sum(runs[0].real[n] for n in counted)
    return {
        "what": name,
        "supervised tokens/s": round(median(speeds[name]), 1),
        "ours / it": round(median_ratio(speeds[OURS], speeds[name]), 3),
        "step_s": round(median(run.seconds[n] for run in runs for n in _timed(run)), 3),
        "padding_percent": round(100 * (1 - real / padded), 2),
        "tokens/step": round(real / len(counted)),
        "peak_bytes": peak_bytes,
        "rounds": len(runs),
    }


def _trl_bars(speeds: dict[str, list[float]], peaks: dict[str, int | None]) -> list[Bar]:
    """Speed against TRL's defaults and its best, memory against its defaults."""
    best = max((name for name in speeds if name.startswith("TRL")), key=lambda name: median(speeds[name]))
    to_default = round(median_ratio(speeds[OURS], speeds[TRL_DEFAULT]), 3)
    to_best = round(median_ratio(speeds[OURS], speeds[best]), 3)
    mine, theirs = peaks[OURS], peaks[TRL_DEFAULT]
    assert mine is not None and theirs is not None
    return [
        Bar(name=f"ours / {TRL_DEFAULT}", value=to_default, rule=">=", limit=FASTER_THAN_DEFAULT),
        Bar(name=f"ours / {best}, its best", value=to_best, rule=">=", limit=FASTER_THAN_BEST),
        Bar(name=f"peak, ours / {TRL_DEFAULT}", value=round(mine / theirs, 3), rule="<=", limit=PEAK_OF_DEFAULT),
    ]


main = benchmark("train", measure)

if __name__ == "__main__":
    main()
