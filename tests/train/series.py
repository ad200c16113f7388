"""Simulated series of memory, each from a seed: what is no leak, and what is."""

from collections.abc import Callable
from typing import Any

import numpy as np

from lean_finetune.core.units import GIB, MIB
from lean_finetune.memory.allocator.caching_allocator import CachingAllocator

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


def peaks(tokens: np.ndarray, draw: Draw) -> np.ndarray:
    """A square law with noise."""
    return LEVEL + 2 * MIB * tokens + 200 * tokens**2 + draw.normal(0, 5 * MIB, len(tokens))


def autoregressive(draw: Draw, memory: float) -> np.ndarray:
    """Noise that remembers so much of itself from step to step; 1 is a random walk."""
    series = np.zeros(STEPS)
    for step, push in enumerate(draw.normal(0, 20 * MIB, STEPS)):
        series[step] = memory * series[step - 1] + push
    return LEVEL + series


def noise(draw: Draw) -> Columns:
    return {"held_bytes": LEVEL + draw.normal(0, 50 * MIB, STEPS)}


def flat(draw: Draw) -> Columns:
    return {"held_bytes": np.full(STEPS, LEVEL + draw.integers(10) * MIB)}


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
    return {"held_bytes": series}


def random_lengths(draw: Draw) -> Columns:
    tokens = lengths(draw)
    return {"tokens": tokens, "allocated_bytes": peaks(tokens, draw)}


def rising_lengths(draw: Draw) -> Columns:
    tokens = np.maximum(1, np.linspace(64, 2048, STEPS).round() + draw.integers(-20, 21, STEPS))
    return {"tokens": tokens, "allocated_bytes": peaks(tokens, draw)}


def falling_lengths(draw: Draw) -> Columns:
    tokens = np.maximum(1, np.linspace(2048, 64, STEPS).round() + draw.integers(-20, 21, STEPS))
    return {"tokens": tokens, "allocated_bytes": peaks(tokens, draw)}


def sorted_epochs(draw: Draw) -> Columns:
    """Two to five epochs, each from short to long."""
    epochs = int(draw.integers(2, 6))
    tokens = np.tile(np.linspace(64, 2048, STEPS // epochs + 1).round(), epochs)[:STEPS]
    return {"tokens": tokens, "allocated_bytes": peaks(tokens, draw)}


def kept_for_the_longest(draw: Draw) -> Columns:
    """A process that keeps what its longest batch so far took."""
    longest = np.maximum.accumulate(tokens := lengths(draw))
    return {"longest_row": tokens, "rss_bytes": 2 * GIB + longest * MIB / 2 + draw.normal(0, 3 * MIB, STEPS)}


NO_LEAK: dict[str, Callable[[Draw], Columns]] = {
    "flat": flat,
    "noise": noise,
    "noise that remembers 0.5": lambda draw: {"rss_bytes": autoregressive(draw, 0.5)},
    "noise that remembers 0.9": lambda draw: {"rss_bytes": autoregressive(draw, 0.9)},
    "random walk": lambda draw: {"rss_bytes": autoregressive(draw, 1.0)},
    "sawtooth": sawtooth,
    "warm-up": warm_up,
    "jumps": jumps,
    "random lengths": random_lengths,
    "rising lengths": rising_lengths,
    "falling lengths": falling_lengths,
    "sorted epochs": sorted_epochs,
    "kept for the longest": kept_for_the_longest,
}


def added(columns: Columns, per_step: float, name: str) -> Columns:
    """A leak on top."""
    return {**columns, name: columns[name] + per_step * np.arange(STEPS)}


LEAK: dict[str, Callable[[Draw], Columns]] = {
    "small, under noise": lambda draw: added(noise(draw), 3 * MIB, "held_bytes"),
    "under lengths": lambda draw: added(random_lengths(draw), 4 * MIB, "allocated_bytes"),
    "on a random walk": lambda draw: added({"rss_bytes": autoregressive(draw, 1.0)}, 24 * MIB, "rss_bytes"),
    "on a sawtooth": lambda draw: added(sawtooth(draw), 4 * MIB, "rss_bytes"),
    "after a warm-up": lambda draw: added(warm_up(draw), 2 * MIB, "rss_bytes"),
    "in bursts": lambda draw: {"held_bytes": LEVEL + np.cumsum(draw.random(STEPS) < 0.3) * 8.0 * MIB},
}


def staircase(tokens: np.ndarray, *, expandable: bool) -> Columns:
    """Steps of an 8B model in 4 bits through CUDA's caching allocator: each keeps activations and frees them all."""
    allocator = CachingAllocator(expandable=expandable, capacity_bytes=None)
    allocator.allocate(6 * GIB)
    allocated, reserved = [], []
    for length in tokens.astype(int).tolist():
        allocator.reset_peaks()
        kept = []
        for _ in range(32):
            kept += [allocator.allocate(2 * 4096 * length) for _ in range(4)]
            inside = [allocator.allocate(2 * 14336 * length) for _ in range(2)]
            kept += [allocator.allocate(2 * 14336 * length)]
            for handle in inside:
                allocator.free(handle)
        logits = [allocator.allocate(4 * 128256 * length) for _ in range(2)]
        for handle in logits + kept[::-1]:
            allocator.free(handle)
        allocated.append(allocator.peak_allocated_bytes)
        reserved.append(allocator.reserved_bytes)
    return {"tokens": tokens, "allocated_bytes": np.array(allocated), "held_reserved_bytes": np.array(reserved)}
