"""Optimizer state on disk against state in memory, and against the disk itself (train.offload_to).

AdamW updates fp32 copies of bf16 weights: 12 bytes of state a value are read and written in each step. The disk itself
is measured in the same rounds, with direct access and blocks of 16 MiB: as many bytes are read and written, one after
the other and both at the same time. The faster of the two is the bar's base. In the end all weights must be equal.
"""

import mmap
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from threading import local
from typing import Any

import torch
from torch import nn

from benchmarks.harness import Measured, Row, at_least, at_most, benchmark, interleaved_seconds, median_ratio
from lean_finetune.step.offload.disk_weights import DiskPlace
from lean_finetune.step.run_optimizer import build_optimizer
from tests.kit.specs import train_of

VALUES, QUICK_VALUES = 24 * 2**20, 2**20
"""Of each of four weights."""
WEIGHTS = 4
ROUNDS, QUICK_ROUNDS = 7, 1
BUFFER_BYTES = 2**30
BLOCK_BYTES = 16 * 2**20
THREADS = 8
STATE_BYTES = 12
"""A value: the copy, and two moments."""
LEAST_SHARE = 0.7
DISK, MEMORY = "update, state on disk", "update, state in memory"
SEQUENTIAL, AT_ONCE = "disk: read, then write", "disk: read and write at once"


class RawFile:
    """A file of the size of the state, with direct access."""

    def __init__(self, directory: Path, size: int):
        """Write it once, so that its blocks exist."""
        self._file = os.open(directory, os.O_TMPFILE | os.O_DIRECT | os.O_RDWR, 0o600)
        self._blocks, self._own = range(size // BLOCK_BYTES), local()
        os.posix_fallocate(self._file, 0, size)
        self.each(self.write)

    def each(self, *work: Callable[[int], int]) -> None:
        """Do the work for every block, in threads."""
        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(lambda pair: pair[0](pair[1]), [(one, block) for block in self._blocks for one in work]))

    def write(self, block: int) -> int:
        """Write a block."""
        return os.pwritev(self._file, [self._buffer()], block * BLOCK_BYTES)

    def read(self, block: int) -> int:
        """Read a block."""
        return os.preadv(self._file, [self._buffer()], block * BLOCK_BYTES)

    def in_turn(self) -> None:
        """Read the file, then write it."""
        self.each(self.read)
        self.each(self.write)

    def at_once(self) -> None:
        """Read and write the file at the same time: each block is read while one half a file away is written."""
        half = len(self._blocks) // 2
        self.each(self.read, lambda block: self.write((block + half) % len(self._blocks)))

    def _buffer(self) -> mmap.mmap:
        """A buffer of this thread."""
        if not hasattr(self._own, "buffer"):
            self._own.buffer = mmap.mmap(-1, BLOCK_BYTES)
        buffer: mmap.mmap = self._own.buffer
        return buffer


def measure(quick: bool) -> Measured:
    """Time updates on disk and in memory, and the disk itself."""
    values, rounds = (QUICK_VALUES, QUICK_ROUNDS) if quick else (VALUES, ROUNDS)
    scratch = Path("scratch")
    scratch.mkdir(exist_ok=True)
    moved = 2 * STATE_BYTES * WEIGHTS * values
    with tempfile.TemporaryDirectory(dir=scratch) as directory:
        place = DiskPlace(directory=Path(directory), buffer_bytes=BUFFER_BYTES)
        on_disk, in_memory = (_updates(values, where) for where in (place, None))
        raw = RawFile(Path(directory), moved // 2)
        cases: dict[str, Callable[[], Any]] = {
            DISK: partial(_update, *on_disk),
            MEMORY: partial(_update, *in_memory),
            SEQUENTIAL: raw.in_turn,
            AT_ONCE: raw.at_once,
        }
        _update(*on_disk)  # The first update allocates the blocks of the file; the next ones overwrite them.
        _update(*in_memory)
        seconds = interleaved_seconds(cases, rounds)
        different = sum(not torch.equal(a, b) for a, b in zip(on_disk[0], in_memory[0], strict=True))
    rows: list[Row] = [
        {"what": name, "seconds": median(times), "slowest_s": max(times), "gb_per_second": moved / median(times) / 1e9}
        for name, times in seconds.items()
    ]
    bars = [at_most("weights that differ from those in memory", different, 0)]
    if not quick:
        base = list(map(min, seconds[SEQUENTIAL], seconds[AT_ONCE]))
        share = median_ratio(base, seconds[DISK])
        bars.append(at_least("speed of the update, as a share of the disk's", share, LEAST_SHARE))
    return Measured(rows=rows, bars=bars)


def _updates(values: int, place: DiskPlace | None) -> tuple[nn.ParameterList, torch.optim.Optimizer]:
    """Weights and their optimizer."""
    draw = torch.Generator().manual_seed(0)
    weights = nn.ParameterList([torch.randn(values, generator=draw).bfloat16() for _ in range(WEIGHTS)])
    train = train_of("full", lr=1e-3, weight_decay=0.01, master_weights=True, offload="optimizer", offload_to="disk")
    return weights, build_optimizer(weights, train, disk=place)


def _update(weights: nn.ParameterList, optimizer: torch.optim.Optimizer) -> None:
    """One optimizer step; the weights serve as gradients."""
    for weight in weights:
        weight.grad = weight.detach().clone()
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    benchmark("offload_disk", measure)()
