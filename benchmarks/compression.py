"""Compressed against recomputed activations, at the same micro-batches, at equal memory and at equal time.

The shipped model trains adapters (LoRA) in fp32 on one CPU thread, on the first rows of a sample of Alpaca if
../shared/data has it beside the checkout, else on generated ones. Each run has a process of its own; they take
turns, step by step, so that they share the machine's noise. Seconds are those of the CPU in a step, which the work of
other processes hardly lengthens. All runs have the same rows in each step. Peaks are counted by
PyTorch's allocator in the steps predicted to be the worst, which are not timed. The held-out loss is that of the last
step's model.

Equal memory: the micro-batches of the run that recomputes every layer are as large as the peak of int8 allows, by
prediction. Equal time: of the runs that recompute, the one whose step takes most nearly as long as int8's. --quick:
few steps of three runs, without the pair of equal time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import click

from benchmarks.compression_cases import Case, Planned, Rows, Trained, TrainingProcess
from benchmarks.harness import Bar, Measured, Row, at_most, benchmark, interleaved

COUNT, QUICK_COUNT = 340, 140
"""Rows, a fifth of them held out."""
TOKENS_PER_STEP, MAX_TOKENS = 3072, 1536
GRANULE = 64
"""Of bucket.max_tokens, where it is raised."""
RECOMPUTED = ("train.grad_ckpt=true",)
NONE, FULL, INT8, EQUAL = "none", "grad_ckpt full", "compress int8", "grad_ckpt full, larger micro-batches"
EVERY_TWO, EVERY_FOUR, SELECTIVE = "grad_ckpt every_n 2", "grad_ckpt every_n 4", "grad_ckpt selective"
SWITCHES: Mapping[str, Sequence[str]] = {
    NONE: (),
    FULL: RECOMPUTED,
    INT8: ("train.compress_activations=int8",),
    SELECTIVE: (*RECOMPUTED, "train.grad_ckpt_policy=selective"),
    EVERY_TWO: (*RECOMPUTED, "train.grad_ckpt_policy=every_n"),
    EVERY_FOUR: (*RECOMPUTED, "train.grad_ckpt_policy=every_n", "train.grad_ckpt_every=4"),
    "compress fp8": ("train.compress_activations=fp8",),
    "compress int8, grad_ckpt full": (*RECOMPUTED, "train.compress_activations=int8"),
}
QUICK = (NONE, FULL, INT8)
AT_EQUAL_TIME = (FULL, SELECTIVE, EVERY_TWO, EVERY_FOUR)
PEAK_LIMIT = 1e-3
"""Counted peaks may differ from predicted ones by this share."""
EQUAL_LIMIT = 0.05
"""Peaks at equal memory, likewise."""
LOSS_LIMIT = 0.02
"""A held-out loss may differ from that without switches by this."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run that has been trained."""

    planned: Planned
    trained: Trained
    seconds: Sequence[float | None]
    """CPU seconds of each step but the first; None where memory was measured."""
    tokens: Sequence[int]
    """Of the same steps, without padding."""

    @property
    def tokens_per_second(self) -> float:
        """Over the steps that were timed."""
        timed = [(s, n) for s, n in zip(self.seconds, self.tokens, strict=True) if s is not None]
        return sum(n for _, n in timed) / sum(s for s, _ in timed)

    def time_as_share_of(self, other: "Run") -> float:
        """Median over the steps that were timed in both."""
        return median(
            a / b for a, b in zip(self.seconds, other.seconds, strict=True) if a is not None and b is not None
        )


def measure(quick: bool) -> Measured:
    """Predict and train every run."""
    rows = Rows.prepared(QUICK_COUNT if quick else COUNT, TOKENS_PER_STEP)
    cases = [Case(name=name, flags=SWITCHES[name], max_tokens=MAX_TOKENS) for name in (QUICK if quick else SWITCHES)]
    planned = {case.name: rows.planned(case) for case in cases}
    planned[EQUAL] = _raised(rows, planned[FULL], planned[INT8].predicted_bytes)
    runs = _trained(rows, planned)
    table: list[Row] = [{**_row(name, run, runs[NONE]), "rows": rows.source} for name, run in runs.items()]
    pairs = {f"equal memory: {INT8} / {EQUAL}": (runs[INT8], runs[EQUAL])}
    if not quick:
        nearest = min(AT_EQUAL_TIME, key=lambda name: abs(runs[INT8].time_as_share_of(runs[name]) - 1))
        pairs[f"equal time: {INT8} / {nearest}"] = (runs[INT8], runs[nearest])
    table += [_pair(what, *pair) for what, pair in pairs.items()]
    return Measured(rows=table, bars=_bars(runs))


def _raised(rows: Rows, planned: Planned, budget_bytes: int) -> Planned:
    """The run with larger micro-batches: the size whose predicted peak is nearest to a budget."""
    low, high = MAX_TOKENS // GRANULE, TOKENS_PER_STEP // GRANULE
    tried = [planned]
    while high - low > 1:
        middle = (low + high) // 2
        case = replace(planned.case, name=EQUAL, max_tokens=middle * GRANULE)
        tried.append(rows.planned(case))
        low, high = (middle, high) if tried[-1].predicted_bytes <= budget_bytes else (low, middle)
    return min(tried[1:], key=lambda one: abs(one.predicted_bytes - budget_bytes))


def _trained(rows: Rows, planned: Mapping[str, Planned]) -> dict[str, Run]:
    """Train all runs, in turns."""
    processes = {name: TrainingProcess(rows, run) for name, run in planned.items()}
    steps: dict[str, Callable[[], float | None]] = {name: process.step for name, process in processes.items()}
    seconds = interleaved(steps, len(planned[NONE].plan.steps) - 1)  # The first step is that which warms up.
    runs = {}
    for name, process in processes.items():
        tokens = rows.tokens_of_steps(planned[name].plan)[1:]
        runs[name] = Run(planned=planned[name], trained=process.finish(), seconds=seconds[name], tokens=tokens)
        click.echo(f"{name}: {runs[name].tokens_per_second:,.0f} tokens/s, {runs[name].trained}", err=True)
    return runs


def _row(name: str, run: Run, plain: Run) -> Row:
    """A run's row."""
    return {
        "what": name,
        "max_tokens": run.planned.case.max_tokens,
        "predicted_bytes": run.planned.predicted_bytes,
        "counted_bytes": run.trained.counted_bytes,
        "step cpu_s": round(median(seconds for seconds in run.seconds if seconds is not None), 3),
        "step / none": round(run.time_as_share_of(plain), 3),
        "tokens/s": round(run.tokens_per_second, 1),
        "held-out loss": round(run.trained.heldout_loss, 5),
        "steps": len(run.planned.plan.steps),
        "timed": sum(seconds is not None for seconds in run.seconds),
    }


def _pair(what: str, one: Run, other: Run) -> Row:
    """Two runs, as ratios and a difference."""
    return {
        "what": what,
        "peak / peak": round(one.trained.counted_bytes / other.trained.counted_bytes, 3),
        "step / step": round(one.time_as_share_of(other), 3),
        "speed / speed": round(one.tokens_per_second / other.tokens_per_second, 3),
        "loss - loss": round(one.trained.heldout_loss - other.trained.heldout_loss, 5),
    }


def _bars(runs: Mapping[str, Run]) -> list[Bar]:
    """Predictions are right, memory is equal where it says so, and all runs learn the same."""
    off = max(abs(run.trained.counted_bytes / run.planned.predicted_bytes - 1) for run in runs.values())
    apart = abs(runs[INT8].planned.predicted_bytes / runs[EQUAL].planned.predicted_bytes - 1)
    losses = [abs(run.trained.heldout_loss - runs[NONE].trained.heldout_loss) for run in runs.values()]
    return [
        at_most("counted peak against the predicted one, largest share", round(off, 6), PEAK_LIMIT),
        at_most("predicted peaks at equal memory, share", round(apart, 4), EQUAL_LIMIT),
        at_most(f"held-out loss against {NONE}, largest difference", round(max(losses), 5), LOSS_LIMIT),
    ]


if __name__ == "__main__":
    benchmark("compression", measure)()
