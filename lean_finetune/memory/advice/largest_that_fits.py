"""The question turned round: the smallest GPU a run fits, the longest rows and the largest budget that fit a GPU."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lean_finetune.memory.advice.verdict import usable_bytes
from lean_finetune.memory.advice.workload import Costs, Workload, full_batch, largest_steps
from lean_finetune.memory.gpus import BF16_CAPABILITY, GPUS, Device
from lean_finetune.memory.predict.peak import predict
from lean_finetune.memory.trace.cuda_kernels import Target, target_of

LENGTH_STEP = 64
"""Row lengths are told as multiples of this."""
PRECISION = 64
"""A largest size is known to one part in so many, or exactly below that."""
MOST_TRACES = 8


@dataclass(frozen=True, kw_only=True)
class Largest:
    """The most of something that fits."""

    value: int
    """0: not even the least fits."""
    limit: str | None
    """What else ends it, where memory does not; None where memory does."""


@dataclass(frozen=True, kw_only=True)
class Inverse:
    """The answers for one run."""

    smallest_gpu: str | None
    """None: no known one is large enough."""
    longest_row: Largest
    """In tokens, one row in a micro-batch."""
    largest_max_tokens: Largest
    """Tokens of a micro-batch of rows of the longest length."""

    def as_json(self) -> dict[str, Any]:
        """As what_fits.json holds it."""
        return asdict(self)


def turn_round(
    run: Workload, device: Device, *, peak_bytes: int, headroom_percent: float, positions: int | None
) -> Inverse:
    """Answer all three questions; every answer that fits was traced.

    Args:
        run: what is trained.
        device: what rows and budget have to fit.
        peak_bytes: what the run was predicted to hold on it.
        headroom_percent: percent of a device kept free.
        positions: the longest row the model knows; None where it knows no end.
    """
    usable, target = usable_bytes(device, headroom_percent), target_of(device)
    shape = run.steps[-1][-1]
    states = Costs(run, device, target).least_bytes(run.setting)
    near = {0: states, shape.rows * shape.length: peak_bytes}
    return Inverse(
        smallest_gpu=smallest_gpu(run, headroom_percent, {_generation(device): peak_bytes}),
        longest_row=longest_row(run, target, usable, positions, near),
        largest_max_tokens=largest_budget(run, target, usable, near),
    )


def _generation(gpu: Device) -> tuple[bool, bool]:
    """What a GPU runs depends on its generation alone: flash attention, the size of cuBLAS' workspaces."""
    return gpu.compute_capability >= BF16_CAPABILITY, gpu.compute_capability >= (9, 0)


def smallest_gpu(run: Workload, headroom_percent: float, known: Mapping[tuple[bool, bool], int]) -> str | None:
    """The known GPU with the least memory that the run fits; `known` are its peaks by generation, so far."""
    peaks = dict(known)
    for gpu in sorted(GPUS, key=lambda gpu: gpu.memory_bytes):
        if run.setting.model.needs_native_bf16 and not gpu.native_bf16:
            continue
        kind = _generation(gpu)
        if kind not in peaks:
            peaks[kind] = predict(run.config, run.setting, run.steps, target_of(gpu)).peak.bytes
        if peaks[kind] <= usable_bytes(gpu, headroom_percent):
            return gpu.name
    return None


def longest_row(run: Workload, target: Target, usable: int, positions: int | None, near: Mapping[int, int]) -> Largest:
    """The longest row of which one fits; `near` as for `largest_budget`."""
    most = (positions or 10**6) // LENGTH_STEP

    def peak_of(count: int) -> int:
        length = count * LENGTH_STEP
        return _peak(run, target, length, max_tokens=length, rows=1)

    hints = {tokens / LENGTH_STEP: size for tokens, size in near.items()}
    found = largest_fitting(peak_of, usable, most, hints)
    limit = f"the model's {positions} positions" if positions is not None and found == most else None
    return Largest(value=found * LENGTH_STEP, limit=limit)


def largest_budget(run: Workload, target: Target, usable: int, near: Mapping[int, int]) -> Largest:
    """The most tokens of rows of the longest length in a micro-batch; more than a step has are never in one.

    `near` are peaks by tokens of a micro-batch, of other shapes: they say where to look first.
    """
    most = max(1, int(run.tokens_per_step // run.longest))

    def peak_of(rows: int) -> int:
        return _peak(run, target, run.longest, max_tokens=rows * run.longest, rows=rows)

    hints = {tokens / run.longest: size for tokens, size in near.items()}
    found = largest_fitting(peak_of, usable, most, hints)
    return Largest(value=found * run.longest, limit="train.tokens_per_step" if found == most else None)


def _peak(run: Workload, target: Target, length: int, *, max_tokens: int, rows: int) -> int:
    """The predicted peak with micro-batches full of such rows."""
    shape = full_batch(run.mode, length, max_tokens=max_tokens, fixed_rows=rows)
    steps = largest_steps(shape, several=run.micro_batches_per_step > 1)
    return predict(run.config, run.setting, steps, target).peak.bytes


def largest_fitting(peak_of: Callable[[int], int], usable: int, most: int, hints: Mapping[float, int]) -> int:
    """The largest count, from 1 to `most`, whose peak is within `usable`; 0 where 1 is not.

    Peaks are nearly straight lines in what they grow with, so each guess is where the line through the nearest two
    known peaks meets `usable`; until two are known, `hints` stand for them. The answer itself fits; it may be short of
    the largest by one part in PRECISION.
    """
    known: dict[float, int] = {}
    low, high = 0, most + 1
    for _ in range(MOST_TRACES):
        if high - low <= 1 + low // PRECISION:
            break
        points: Mapping[float, int] = {**hints, **known} if len(known) < 2 else dict(known)
        guess = min(max(_guess(points, usable, low), low + 1), high - 1)
        known[guess] = peak_of(guess)
        if known[guess] <= usable:
            low = guess
        else:
            high = guess
    return low


def _guess(points: Mapping[float, int], usable: int, low: int) -> int:
    """Where the line through the two points nearest to `usable` meets it."""
    if len(points) < 2:
        return 4 * low
    (a, peak_a), (b, peak_b) = sorted(points.items(), key=lambda point: abs(point[1] - usable))[:2]
    slope = (peak_b - peak_a) / (b - a)
    return 2 * low if slope <= 0 else int(a + (usable - peak_a) / slope)
