"""Simulated series of memory, each from a seed: with a leak and without."""

from collections.abc import Callable
from typing import Any

import numpy as np

from cuda_memory.allocator import CachingAllocator
from cuda_memory.units import GIB, MIB

STEPS = 365
LEVEL = 10.0 * GIB
Columns = dict[str, np.ndarray]
Draw = np.random.Generator


def rows_of(**columns: np.ndarray) -> list[dict[str, Any]]:
    """Rows of curves with these columns."""
    steps = len(next(iter(columns.values())))
    return [{"step": step, **{name: float(column[step]) for name, column in columns.items()}} for step in range(steps)]


def lengths(draw: Draw) -> np.ndarray:
    """Tokens of batches of one row each, as chat rows are long."""
    return np.clip(draw.lognormal(5.2, 0.9, STEPS), 16, 2048).round()


def autoregressive(draw: Draw, memory: float) -> np.ndarray:
    """Noise with this autocorrelation; 1 is a random walk."""
    series = np.zeros(STEPS)
    for step, push in enumerate(draw.normal(0, 20 * MIB, STEPS)):
        series[step] = memory * series[step - 1] + push
    return LEVEL + series


def sawtooth(draw: Draw) -> Columns:
    """A cache that fills and empties every 3 to 20 steps."""
    period = draw.integers(3, 21)
    filled = (np.arange(STEPS) + draw.integers(period)) % period / period
    return {"rss_bytes": LEVEL + draw.uniform(50, 500) * MIB * filled + draw.normal(0, 2 * MIB, STEPS)}


def warm_up(draw: Draw) -> Columns:
    """Growth of up to 2 GiB that fades within some tens of steps."""
    fading = np.exp(-np.arange(STEPS) / draw.uniform(2, 12))
    return {"rss_bytes": LEVEL + draw.uniform(0.1, 2) * GIB * (1 - fading) + draw.normal(0, 2 * MIB, STEPS)}


def jumps(draw: Draw) -> Columns:
    """One to four jumps at any time: a first evaluation, a library loaded late."""
    series = LEVEL + draw.normal(0, 2 * MIB, STEPS)
    for _ in range(draw.integers(1, 5)):
        series[draw.integers(STEPS) :] += draw.uniform(20, 400) * MIB
    return {"live_bytes": series}


def with_peaks(tokens: np.ndarray, draw: Draw) -> Columns:
    """Peaks by a square law of the tokens, with noise."""
    noise = draw.normal(0, 5 * MIB, len(tokens))
    return {"tokens": tokens, "allocated_bytes": LEVEL + 2 * MIB * tokens + 200 * tokens**2 + noise}


def sorted_lengths(draw: Draw, first: int, last: int) -> np.ndarray:
    return np.maximum(1, np.linspace(first, last, STEPS).round() + draw.integers(-20, 21, STEPS))


def sorted_epochs(draw: Draw) -> Columns:
    """Two to five epochs, each from short to long."""
    epochs = int(draw.integers(2, 6))
    return with_peaks(np.tile(np.linspace(64, 2048, STEPS // epochs + 1).round(), epochs)[:STEPS], draw)


def as_for_the_longest(draw: Draw) -> Columns:
    """A process that never frees the memory of its longest batch."""
    longest = np.maximum.accumulate(tokens := lengths(draw))
    return {"longest_row": tokens, "rss_bytes": 2 * GIB + longest * MIB / 2 + draw.normal(0, 3 * MIB, STEPS)}


NO_LEAK: dict[str, Callable[[Draw], Columns]] = {
    "flat": lambda draw: {"live_bytes": np.full(STEPS, LEVEL)},
    "noise": lambda draw: {"live_bytes": LEVEL + draw.normal(0, 50 * MIB, STEPS)},
    "noise that remembers 0.5": lambda draw: {"rss_bytes": autoregressive(draw, 0.5)},
    "noise that remembers 0.9": lambda draw: {"rss_bytes": autoregressive(draw, 0.9)},
    "random walk": lambda draw: {"rss_bytes": autoregressive(draw, 1.0)},
    "sawtooth": sawtooth,
    "warm-up": warm_up,
    "jumps": jumps,
    "random lengths": lambda draw: with_peaks(lengths(draw), draw),
    "rising lengths": lambda draw: with_peaks(sorted_lengths(draw, 64, 2048), draw),
    "falling lengths": lambda draw: with_peaks(sorted_lengths(draw, 2048, 64), draw),
    "sorted epochs": sorted_epochs,
    "as for the longest": as_for_the_longest,
}


def leaking(kind: str, per_step: float, name: str) -> Callable[[Draw], Columns]:
    """A leak on top of a series without one."""

    def draw_columns(draw: Draw) -> Columns:
        columns = NO_LEAK[kind](draw)
        return {**columns, name: columns[name] + per_step * np.arange(STEPS)}

    return draw_columns


LEAK: dict[str, Callable[[Draw], Columns]] = {
    "small, under noise": leaking("noise", 3 * MIB, "live_bytes"),
    "under lengths": leaking("random lengths", 4 * MIB, "allocated_bytes"),
    "on a random walk": leaking("random walk", 24 * MIB, "rss_bytes"),
    "on a sawtooth": leaking("sawtooth", 4 * MIB, "rss_bytes"),
    "after a warm-up": leaking("warm-up", 2 * MIB, "rss_bytes"),
    "in bursts": lambda draw: {"live_bytes": LEVEL + np.cumsum(draw.random(STEPS) < 0.3) * 8.0 * MIB},
}


def staircase(tokens: np.ndarray, *, expandable: bool) -> Columns:
    """Steps of an 8B model in 4 bits through CUDA's caching allocator: each keeps activations and frees them all."""
    allocator = CachingAllocator(expandable=expandable, capacity_bytes=None)
    allocator.allocate(6 * GIB)
    allocated, reserved = [], []
    for length in tokens.astype(int).tolist():
        allocator.reset_peaks()
        activations = []
        for _ in range(32):
            activations += [allocator.allocate(2 * 4096 * length) for _ in range(4)]
            inside = [allocator.allocate(2 * 14336 * length) for _ in range(2)]
            activations += [allocator.allocate(2 * 14336 * length)]
            for handle in inside:
                allocator.free(handle)
        logits = [allocator.allocate(4 * 128256 * length) for _ in range(2)]
        for handle in logits + activations[::-1]:
            allocator.free(handle)
        allocated.append(allocator.peak_allocated_bytes)
        reserved.append(allocator.reserved_bytes)
    return {"tokens": tokens, "allocated_bytes": np.array(allocated), "reserved_bytes": np.array(reserved)}
