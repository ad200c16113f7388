"""Count offloaded activations in a trace: a store for lean_finetune.step.activation_offload that keeps no values."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lean_finetune.memory.predict.depth_extrapolation import NotRepeated
from lean_finetune.memory.predict.layer_structure import Repetition
from lean_finetune.memory.trace.memory_trace import ACTIVATIONS, MemoryTrace


@dataclass(frozen=True, kw_only=True, eq=False)
class _Counted:
    """Handle of an offloaded tensor."""

    count: int
    dtype: torch.dtype


class CountingStore:
    """Counts offloaded bytes and their peak."""

    def __init__(self, trace: MemoryTrace, *, pinned: bool):
        """`pinned`: blocks are powers of two, as in CUDA's CachingHostAllocator."""
        self.device = torch.device("cpu")
        self.peak_bytes = 0
        self._bytes, self._trace, self._pinned = 0, trace, pinned

    def put(self, values: torch.Tensor) -> _Counted:
        """Count `values` until the handle is freed."""
        size = 1 << (values.nbytes - 1).bit_length() if self._pinned else values.nbytes
        self._bytes += size
        self.peak_bytes = max(self.peak_bytes, self._bytes)
        handle = _Counted(count=values.numel(), dtype=values.dtype)
        weakref.finalize(handle, self._drop, size).atexit = False
        return handle

    def get(self, handle: _Counted) -> torch.Tensor:
        """A new activation on the traced device."""
        values = torch.empty(handle.count, dtype=handle.dtype)
        self._trace.register([values], ACTIVATIONS)
        return values

    def _drop(self, size: int) -> None:
        self._bytes -= size


def offloaded_bytes(traces: Sequence[MemoryTrace], repetition: Repetition) -> int:
    """Peak of offloaded bytes in a deep model, from traces at `repetition.depths`.

    Raises:
        NotRepeated: they are not linear in depth.
    """
    first, second, third = (trace.offloaded_peak_bytes for trace in traces)
    if third - second != second - first:
        raise NotRepeated(f"{first}, {second}, {third} bytes are offloaded")
    return third + (third - second) * ((repetition.layers - repetition.depths[-1]) // repetition.period)
