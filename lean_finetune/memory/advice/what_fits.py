"""What fits: every single change of the run, the smallest GPU, the longest row and the largest micro-batch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from cuda_memory.gpus import BF16_CAPABILITY, GPUS, Device
from cuda_memory.units import GIB, round_up
from lean_finetune.config.declared_params import params_of_rules
from lean_finetune.config.load import keeps_rules
from lean_finetune.core.errors import UserError
from lean_finetune.core.progress import progress_bar
from lean_finetune.memory.advice.full_rows import full_batch, largest_steps
from lean_finetune.memory.advice.run import Run
from lean_finetune.memory.advice.search_space import part_of_bucket
from lean_finetune.memory.advice.step_cost import Costs
from lean_finetune.memory.predict.peak import Prediction
from lean_finetune.memory.predict.traced_step import halved
from lean_finetune.memory.switches.all_switches import SWITCHES
from lean_finetune.memory.switches.switch import Support, different, flags_of, set_options, setting_with
from lean_finetune.memory.trace.setting import Setting
from lean_finetune.model.beside.whole_config import refuse_parts
from lean_finetune.model.model_config import max_positions, row_loop
from lean_finetune.model.quantize import method_fault

SweepPoint = tuple[tuple[str, ...], int]
"""Overrides for `dvc exp run -S` (none for the run itself), and the predicted peak in bytes."""


def as_rows(points: Sequence[SweepPoint]) -> list[dict[str, Any]]:
    """The lines of switches.csv."""
    labels = [" ".join(flags).partition(".")[2] or "current" for flags, _ in points]
    peaks = [round(peak_bytes / GIB, 6) for _, peak_bytes in points]
    return [{"switch": label, "peak_gib": peak} for label, peak in zip(labels, peaks, strict=True)]


def as_advice(points: Sequence[SweepPoint]) -> list[dict[str, Any]]:
    """`single_changes` in advice.json."""
    changes = ((set_options(flags), peak_bytes) for flags, peak_bytes in points if flags)
    return [{"command": f"dvc exp run {options}", "peak_bytes": peak_bytes} for options, peak_bytes in changes]


def sweep_switches(run: Run, current: Prediction) -> list[SweepPoint]:
    """Trace every single change over the micro-batches that set the current peak. The current setting comes first.

    Only overrides that keep the rules are traced.
    """
    steps, setting, half = current.steps_of_peak, run.setting, part_of_bucket(run.bucket, run.longest, 2)
    support = Support(cuda=run.target.foreach, native_bf16=run.device.native_bf16)
    changes = [
        (flags, changed, steps)
        for flags, changed in single_changes(setting, support)
        if method_fault(run.config, changed.train) is None
    ]
    fewer = halved(steps)
    if fewer is not None and half and not setting.train.optimizer_in_backward:
        changes.insert(0, (flags_of(half), setting, fewer))
    changes = [change for change in changes if keeps_rules(params_of_rules(run.params), change[0])]
    bar = progress_bar(changes, desc="estimate", unit=" switches", disable=not run.params.run.progress)
    points: list[SweepPoint] = [((), current.peak.bytes)]
    for flags, changed, shapes in bar:
        with suppress(UserError):  # The model cannot have this switch: GPT-NeoX-Japanese cannot recompute layers.
            refuse_parts(changed.train, run.config)
            points.append((flags, replace(run, setting=changed, steps=shapes).predict().peak.bytes))
    return points


def single_changes(setting: Setting, support: Support) -> Iterator[tuple[tuple[str, ...], Setting]]:
    """Every setting that differs in one switch, with its overrides."""
    for switch in SWITCHES:
        for variant in switch.shown(setting, support):
            if values := different(setting, variant):
                yield flags_of(values), setting_with(setting, values)


# The smallest GPU for a run, and the longest row and the largest micro-batch that fit a GPU.

LENGTH_STEP = 64
"""Row lengths are multiples of this."""
PRECISION = 64
"""A largest size is accurate to one part in this many, and exact below it."""
MOST_TRACES = 8
MOST_TOKENS = {"none": 10**6, "parts": 2**14, "tokens": 2**10}
"""The longest row that is tried, by what of a row the model's code loops over: a trace of more takes minutes."""


@dataclass(frozen=True, kw_only=True)
class Largest:
    """The largest value that fits."""

    value: int
    """0 if nothing fits."""
    limit: str | None
    """The limit that it reaches if that is not memory, in words; None if it is."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The answers for one run."""

    smallest_gpu: str | None
    """None if no known GPU is large enough."""
    longest_row: Largest
    """In tokens, one row in a micro-batch."""
    largest_max_tokens: Largest
    """Tokens of a micro-batch with rows of data.max_length."""


def find_limits(run: Run, peak_bytes: int) -> Limits:
    """Find all three limits. Every returned value was traced and fits. `peak_bytes` is the run's predicted peak."""
    shape, least_bytes = run.steps[-1][-1], Costs(run).least_bytes(run.setting)
    smallest = smallest_gpu(run, {generation(run.device): peak_bytes})
    if least_bytes > run.fitting_bytes:  # Not even its states fit.
        nothing = Largest(value=0, limit=None)
        return Limits(smallest_gpu=smallest, longest_row=nothing, largest_max_tokens=nothing)
    near = {0: least_bytes, shape.rows * shape.length: peak_bytes}
    with progress_bar(total=2, desc="limits", unit=" searches", disable=not run.params.run.progress) as bar:
        longest = longest_fitting_row(run, run.fitting_bytes, near)
        bar.update()
        batch = largest_micro_batch(run, run.fitting_bytes, near)
        bar.update()
    if peak_bytes <= run.fitting_bytes:  # The run itself fits; few traces may not find as much.
        longest = replace(longest, value=max(longest.value, run.longest))
        batch = replace(batch, value=max(batch.value, shape.rows * shape.length))
    return Limits(smallest_gpu=smallest, longest_row=longest, largest_max_tokens=batch)


def generation(gpu: Device) -> tuple[bool, bool]:
    """The generation of a GPU decides all that changes a peak: flash attention and the size of cuBLAS' workspaces."""
    return gpu.compute_capability >= BF16_CAPABILITY, gpu.compute_capability >= (9, 0)


def smallest_gpu(run: Run, known: Mapping[tuple[bool, bool], int]) -> str | None:
    """The known GPU with the least memory that the run fits. `known` are peaks of the run by generation."""
    peaks = dict(known)
    for gpu in sorted(GPUS, key=lambda gpu: gpu.memory_bytes):
        if run.setting.train.needs_native_bf16 and not gpu.native_bf16:
            continue
        kind = generation(gpu)
        if kind not in peaks:
            peaks[kind] = replace(run, device=gpu).predict().peak.bytes
        if peaks[kind] <= replace(run, device=gpu).fitting_bytes:
            return gpu.name
    return None


def longest_fitting_row(run: Run, usable: int, near: Mapping[int, int]) -> Largest:
    """The longest row that fits alone in a micro-batch. `near` as for `largest_micro_batch`."""
    tried, positions = MOST_TOKENS[row_loop(run.config)], max_positions(run.config)
    most = min(positions or tried, tried) // LENGTH_STEP
    hints = {tokens / LENGTH_STEP: size for tokens, size in near.items()}
    found = largest_fitting(
        lambda count: _peak(run, count * LENGTH_STEP, units=1), usable, most, hints, most_traces=_traces(run)
    )
    of_model = positions is not None and positions <= tried
    limit = f"the model's {positions:,} positions" if of_model else "what is tried"
    return Largest(value=found * LENGTH_STEP, limit=limit if found == most else None)


def largest_micro_batch(run: Run, usable: int, near: Mapping[int, int]) -> Largest:
    """The most tokens in a micro-batch with rows of data.max_length, up to the tokens of a step.

    `near` are peaks by the tokens of micro-batches of other shapes: where to start.
    """
    unit = run.setting.train.row_kind.unit * run.longest
    most = max(1, int(run.tokens_per_step * run.setting.layout.context // unit))
    hints = {tokens / unit: size for tokens, size in near.items()}
    found = largest_fitting(
        lambda units: _peak(run, run.longest, units=units), usable, most, hints, most_traces=_traces(run)
    )
    return Largest(value=found * unit, limit="train.tokens_per_step" if found == most else None)


def _traces(run: Run) -> int:
    """The most traces of a search."""
    return run.full_row.most_traces(run.setting.train, MOST_TRACES)


def _peak(run: Run, length: int, *, units: int) -> int:
    """The predicted peak with micro-batches of so many such rows, or pairs of rows."""
    kind, row = run.setting.train.row_kind, run.full_row
    length = max(length, round_up(row.shortest_row, run.params.bucket.pad_multiple))
    sizes = {"max_tokens": units * kind.unit * length, "fixed_rows": units * kind.unit}
    shape = full_batch(run.bucket.model_copy(update=sizes), length, kind, row)
    steps = largest_steps(shape, several=run.micro_batches_per_step > 1, in_flight=run.in_flight)
    return replace(run, steps=steps).predict().peak.bytes


def largest_fitting(
    peak_of: Callable[[int], int],
    usable: int,
    most: int,
    hints: Mapping[float, int],
    *,
    most_traces: int = MOST_TRACES,
) -> int:
    """The largest count, from 1 to `most`, whose peak is at most `usable`; 0 if there is none.

    Peaks grow nearly linearly with the count. So each guess is where the line through the nearest two known peaks meets
    `usable`. `hints` replace known peaks at the start. The result fits; it may be too small by one part in PRECISION.
    """
    known: dict[float, int] = {}
    low, high = 0, most + 1
    for _ in range(most_traces):
        if high - low <= 1 + low // PRECISION:
            break
        points = {**hints, **known} if len(known) < 2 else known
        guess = min(max(_guess(points, usable, low), low + 1), high - 1)
        known[guess] = peak_of(guess)
        if known[guess] <= usable:
            low = guess
        else:
            high = guess
    return low


def _guess(points: Mapping[float, int], usable: int, low: int) -> int:
    """The count to try next: where the points are expected to meet `usable`."""
    if len(points) < 2:
        return 4 * low
    met = meets(points, usable)
    return 2 * low if met is None else int(met)


def meets(points: Mapping[float, int], usable: int) -> float | None:
    """Where the line through the two points nearest to `usable` meets it; None if it does not rise."""
    (a, peak_a), (b, peak_b) = sorted(points.items(), key=lambda point: abs(point[1] - usable))[:2]
    slope = (peak_b - peak_a) / (b - a)
    return None if slope <= 0 else a + (usable - peak_a) / slope
