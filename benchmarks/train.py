"""Stage train against Hugging Face's Trainer, TRL's SFTTrainer, and the bare forward and backward passes.

A small Llama of random weights (5 M parameters, 1,280 tokens) is fully fine-tuned in fp32 on the same made-up rows
of prompt and completion, of which the completion alone is trained, with about the same tokens in each optimizer step.
Contestants take turns, each in a fresh process every time; the first steps of each are left out. The limit is that of
our own batches, run by turns with our steps in one process (benchmarks/rivals/our_steps.py). Peak memory is that of
PyTorch's allocator, counted in a run of its own: from loading to the end of the first step and in the steps with the
largest micro-batches, of ours by stage train itself. TRL gets the virtual environment of benchmarks.data. --quick: few
steps, no TRL.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median

import click

from benchmarks.form import Bar, Measured, Row, benchmark, interleaved, median_ratio
from benchmarks.train_cases import Field, Peak, Steps, TrainerCase, trl

ROWS, QUICK_ROWS = 104, 100
ROUNDS, QUICK_ROUNDS = 5, 1
TOKENS_PER_STEP, MAX_TOKENS = 2048, 1024
WARM_UP_STEPS = 2
"""Left out of each process: pages are first touched, kernels first chosen."""
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
    rivals, skipped = _rivals(quick, ground.rows_per_step)
    cases: dict[str, Callable[[], Steps]] = {OURS: ground.ours}
    cases |= {name: partial(case.run, ground, ground.steps) for name, case in rivals.items()}
    runs = interleaved(
        {name: partial(_run, name, case) for name, case in cases.items()},
        QUICK_ROUNDS if quick else ROUNDS,
        warm_up=False,
    )
    counts: dict[str, Callable[[], Peak]] = {OURS: ground.our_peak}
    counts |= {name: partial(case.peak, ground, runs[name][0]) for name, case in rivals.items()}
    peaks = {name: _peak(name, count) for name, count in counts.items()}
    speeds = {name: [_supervised_per_second(run) for run in runs[name]] for name in cases}
    overhead = round(median(_overhead(run) for run in runs[OURS]), 3)
    table = [_row(name, runs[name], peaks[name], speeds) for name in speeds]
    table[0] = {**table[0], "of the limit": overhead}
    table.append({"what": LIMIT, "of the limit": 1.0})
    table += [{"what": name, "skipped": reason} for name, reason in skipped.items()]
    bars = [Bar(name="ours / forward + backward", value=overhead, rule="<=", limit=OVERHEAD_LIMIT)]
    if TRL_DEFAULT in speeds:
        bars += _trl_bars(speeds, peaks)
    return Measured(rows=table, bars=bars)


def _run(name: str, case: Callable[[], Steps]) -> Steps:
    """One run, told at once: a benchmark that is broken off has shown what it had."""
    run = case()
    of_limit = "" if run.limit_seconds is None else f", {_overhead(run):.3f} x {LIMIT}"
    click.echo(f"{name}: {_supervised_per_second(run):,.1f} supervised tokens/s{of_limit}", err=True)
    return run


def _peak(name: str, count: Callable[[], Peak]) -> Peak:
    """One count of memory, told at once."""
    peak = count()
    click.echo(f"{name}: peak {peak.peak_bytes / 2**20:,.1f} MiB, counted in steps {peak.steps}", err=True)
    return peak


def _rivals(quick: bool, rows_per_step: float) -> tuple[dict[str, TrainerCase], dict[str, str]]:
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


def _supervised_per_second(run: Steps) -> float:
    """Trained tokens a second."""
    return sum(run.supervised[WARM_UP_STEPS:]) / sum(run.seconds[WARM_UP_STEPS:])


def _overhead(run: Steps) -> float:
    """A run as a multiple of its limit, over the same steps."""
    assert run.limit_seconds is not None
    return sum(run.seconds[WARM_UP_STEPS:]) / sum(run.limit_seconds[WARM_UP_STEPS:])


def _row(name: str, runs: Sequence[Steps], peak: Peak, speeds: dict[str, list[float]]) -> Row:
    """A contestant's line."""
    counted = [n for n in range(len(runs[0].padded)) if runs[0].padded[n]]
    padded, real = sum(runs[0].padded[n] for n in counted), sum(runs[0].real[n] for n in counted)
    return {
        "what": name,
        "supervised tokens/s": round(median(speeds[name]), 1),
        "ours / it": round(median_ratio(speeds[OURS], speeds[name]), 3),
        "step_s": round(median(seconds for run in runs for seconds in run.seconds[WARM_UP_STEPS:]), 3),
        "padding_percent": round(100 * (1 - real / padded), 2),
        "tokens/step": round(real / len(counted)),
        "peak_bytes": peak.peak_bytes,
        "peak of steps": " ".join(map(str, peak.steps)),
        "rounds": len(runs),
    }


def _trl_bars(speeds: dict[str, list[float]], peaks: Mapping[str, Peak]) -> list[Bar]:
    """Speed against TRL's defaults and its best, memory against its defaults."""
    best = max((name for name in speeds if name.startswith("TRL")), key=lambda name: median(speeds[name]))
    to_default = round(median_ratio(speeds[OURS], speeds[TRL_DEFAULT]), 3)
    to_best = round(median_ratio(speeds[OURS], speeds[best]), 3)
    mine, theirs = peaks[OURS].peak_bytes, peaks[TRL_DEFAULT].peak_bytes
    return [
        Bar(name=f"ours / {TRL_DEFAULT}", value=to_default, rule=">=", limit=FASTER_THAN_DEFAULT),
        Bar(name=f"ours / {best}, its best", value=to_best, rule=">=", limit=FASTER_THAN_BEST),
        Bar(name=f"peak, ours / {TRL_DEFAULT}", value=round(mine / theirs, 3), rule="<=", limit=PEAK_OF_DEFAULT),
    ]


main = benchmark("train", measure)

if __name__ == "__main__":
    main()
