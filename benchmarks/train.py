"""Stage train against Hugging Face's Trainer, TRL's SFTTrainer, and the bare forward and backward passes.

A small Llama of random weights (5 M parameters, 1,280 tokens) is fully fine-tuned in fp32 on the same generated rows
of prompt and completion. Only the completion is trained, with about the same tokens in each optimizer step. Each rival
is compared with ours in the same setting: no activation checkpointing on both sides, checkpointing on both sides, or
rows packed on both sides (TRL: strategy bfd, hence padding-free). TRL's own loss works in chunks already.

Contestants take turns, each in a new process every time; the first steps of each do not count. The limit is the bare
passes over our own batches, interleaved with our steps in one process (benchmarks/rivals/our_steps.py). Peak memory is
that of PyTorch's allocator in a separate run: from loading to the end of the first step, and in the steps with the
largest micro-batches (ours: by stage train itself). Each row has its versions. --quick: few steps, no TRL.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import click

from benchmarks.harness import Bar, Measured, Row, at_least, at_most, benchmark, interleaved, median_ratio
from benchmarks.processes import TRL
from benchmarks.train_cases import HF_TRAINER, Peak, Setup, Steps, TrainerCase

ROWS, QUICK_ROWS = 104, 100
ROUNDS, QUICK_ROUNDS = 5, 1
TOKENS_PER_STEP, MAX_TOKENS = 2048, 1024
WARM_UP_STEPS = 2
"""Steps at the start of each process that do not count: pages are touched and kernels chosen for the first time."""
TRL_BATCH_ROWS = 8
"""TRL's default."""
LIMIT = "forward + backward alone"
OURS, OURS_RECOMPUTED, OURS_PACKED = "ours", "ours, checkpointing", "ours, packed"
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    OURS: {},
    OURS_RECOMPUTED: {"train.grad_ckpt": True},
    OURS_PACKED: {"bucket.mode": "packed"},
}
HF = HF_TRAINER.name
TRL_PLAIN, TRL_LENGTH, TRL_PACKED = "TRL, no checkpointing", "TRL, group_by_length", "TRL, packing"
TRL_DEFAULT = "TRL, its defaults (checkpointing)"
OVERHEAD_LIMIT = 1.03
FASTER_LIMITS = {TRL_PLAIN: 1.3, TRL_LENGTH: 1.3, TRL_DEFAULT: 1.3, TRL_PACKED: 1.05}
"""How many times as fast ours must be, in the same setting."""
PEAK_LIMITS = {TRL_PLAIN: 0.7, TRL_DEFAULT: 0.7}


def measure(quick: bool) -> Measured:
    """Run every contestant."""
    setups = {name: _prepared(name, quick) for name in ([OURS] if quick else SETTINGS)}
    setup = setups[OURS]
    rivals, skipped = _rivals(quick, setup)
    cases: dict[str, Callable[[], Steps]] = {name: own.ours for name, own in setups.items()}
    cases |= {name: partial(rival.run, setup, setup.steps) for name, rival in rivals.items()}
    runs = interleaved(
        {name: partial(_run, name, case) for name, case in cases.items()},
        QUICK_ROUNDS if quick else ROUNDS,
        warm_up=False,
    )
    counts: dict[str, Callable[[], Peak]] = {name: own.our_peak for name, own in setups.items()}
    counts |= {name: partial(rival.peak, setup, runs[name][0]) for name, rival in rivals.items()}
    peaks = {name: _peak(name, count) for name, count in counts.items()}
    speeds = {name: [_supervised_per_second(run) for run in runs[name]] for name in cases}
    likes = {name: rivals[name].like if name in rivals else name for name in cases}
    table = [_row(name, runs[name], peaks[name], speeds, likes[name]) for name in cases]
    table.append({"what": LIMIT, "of the limit": 1.0})
    table += [{"what": name, "skipped": reason} for name, reason in skipped.items()]
    overhead = round(median(map(_overhead, runs[OURS])), 3)
    bars = [at_most(f"{OURS} / forward + backward", overhead, OVERHEAD_LIMIT), *_trl_bars(speeds, peaks, likes)]
    return Measured(rows=table, bars=[] if quick else bars)  # Few steps are too noisy.


def _prepared(name: str, quick: bool) -> Setup:
    """Ours in one setting, planned and ready to run."""
    own = Setup(
        rows=QUICK_ROWS if quick else ROWS,
        tokens_per_step=TOKENS_PER_STEP,
        max_tokens=MAX_TOKENS,
        settings=SETTINGS[name],
        name=f"train-{list(SETTINGS).index(name)}",
    )
    own.prepare()
    return own


def _run(name: str, case: Callable[[], Steps]) -> Steps:
    """One run, printed at once, so that an interrupted benchmark has shown its results so far."""
    run = case()
    of_limit = "" if run.limit_seconds is None else f", {_overhead(run):.3f} x {LIMIT}"
    click.echo(f"{name}: {_supervised_per_second(run):,.1f} supervised tokens/s{of_limit}", err=True)
    return run


def _peak(name: str, count: Callable[[], Peak]) -> Peak:
    """One measurement of memory, printed at once."""
    peak = count()
    click.echo(f"{name}: peak {peak.peak_bytes / 2**20:,.1f} MiB, measured in steps {peak.steps}", err=True)
    return peak


def _rivals(quick: bool, setup: Setup) -> tuple[dict[str, TrainerCase], dict[str, str]]:
    """(rivals by name, reason by name of those that cannot run)."""
    accumulated = max(1, round(setup.rows_per_step / TRL_BATCH_ROWS))
    batch = {"per_device_train_batch_size": TRL_BATCH_ROWS, "gradient_accumulation_steps": accumulated}
    rivals = {HF: TrainerCase(trainer="hf", arguments=batch, like=OURS)}
    if quick:
        return rivals, {}
    if reason := TRL.prepare():
        click.echo(f"note: TRL is skipped: {reason}", err=True)
        return rivals, {TRL_DEFAULT: reason}
    plain = {**batch, "gradient_checkpointing": False}
    packed = {
        "packing": True,
        "packing_strategy": "bfd",
        "max_length": MAX_TOKENS,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": TOKENS_PER_STEP // MAX_TOKENS,
    }
    for name, arguments, like in (
        (TRL_DEFAULT, batch, OURS_RECOMPUTED),
        (TRL_PLAIN, plain, OURS),
        (TRL_LENGTH, {**plain, "train_sampling_strategy": "group_by_length"}, OURS),
        (TRL_PACKED, packed, OURS_PACKED),
    ):
        rivals[name] = TrainerCase(trainer="trl", arguments=arguments, rival=TRL, like=like)
    return rivals, {}


def _supervised_per_second(run: Steps) -> float:
    """Trained tokens per second."""
    return sum(run.supervised[WARM_UP_STEPS:]) / sum(run.seconds[WARM_UP_STEPS:])


def _overhead(run: Steps) -> float:
    """Time of a run as a multiple of its limit, over the same steps."""
    assert run.limit_seconds is not None
    return sum(run.seconds[WARM_UP_STEPS:]) / sum(run.limit_seconds[WARM_UP_STEPS:])


def _row(name: str, runs: Sequence[Steps], peak: Peak, speeds: Mapping[str, list[float]], like: str) -> Row:
    """A contestant's row; `like` names ours in the same setting."""
    counted = [n for n in range(len(runs[0].padded)) if runs[0].padded[n]]
    padded, real = sum(runs[0].padded[n] for n in counted), sum(runs[0].real[n] for n in counted)
    return {
        "what": name,
        "supervised tokens/s": round(median(speeds[name]), 1),
        "compared with": like,
        "that / it": round(median_ratio(speeds[like], speeds[name]), 3),
        "of the limit": None if runs[0].limit_seconds is None else round(median(map(_overhead, runs)), 3),
        "step_s": round(median(seconds for run in runs for seconds in run.seconds[WARM_UP_STEPS:]), 3),
        "padding_percent": round(100 * (1 - real / padded), 2),
        "tokens/step": round(real / len(counted)),
        "peak_bytes": peak.peak_bytes,
        "peak of steps": " ".join(map(str, peak.steps)),
        "rounds": len(runs),
        "versions": ", ".join(f"{library} {version}" for library, version in runs[0].versions.items()) or None,
    }


def _trl_bars(speeds: Mapping[str, list[float]], peaks: Mapping[str, Peak], likes: Mapping[str, str]) -> Iterator[Bar]:
    """Bars of speed and memory against TRL in the same setting, for the cases that ran."""
    for name in (name for name in FASTER_LIMITS if name in speeds):
        like = likes[name]
        faster = round(median_ratio(speeds[like], speeds[name]), 3)
        yield at_least(f"{like} / {name}", faster, FASTER_LIMITS[name])
        if name in PEAK_LIMITS:
            smaller = round(peaks[like].peak_bytes / peaks[name].peak_bytes, 3)
            yield at_most(f"peak, {like} / {name}", smaller, PEAK_LIMITS[name])


if __name__ == "__main__":
    benchmark("train", measure)()
