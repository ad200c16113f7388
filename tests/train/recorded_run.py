"""Records a run on a CPU as CUDA's allocator would: real tensors, lifetimes and Python stacks, with fake addresses."""

import sys
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests.cuda_memory.snapshots import Dictionary, Snapshot, frame

WRAPPERS = 4
"""Frames of PyTorch's dispatch mode between an operation and its caller."""
AUTOGRAD = "_engine_run_backward"
"""On CUDA the callers of backward are in another thread than its operations."""


class Recorder(TorchDispatchMode):
    """Records the storages that operations return. Temporaries inside of an operation are not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.snapshot = Snapshot()
        self.snapshot.reserve(0, 2**40)
        self._end = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for key, (storage, start) in list(self._live.items()):
            if storage.expired():
                self.snapshot.free(start)
                del self._live[key]
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes():
                self._add(tensor.untyped_storage())
        return out

    def _add(self, storage: Any) -> None:
        if storage._cdata not in self._live:
            self.snapshot.alloc(self._end, storage.nbytes(), *_stack())
            self._live[storage._cdata] = StorageWeakRef(storage), self._end
            self._end += -(-storage.nbytes() // 512) * 512


def _stack() -> list[Dictionary]:
    """The frames of the operation's caller, innermost first."""
    found, at = [], sys._getframe(WRAPPERS + 2)
    while at is not None and at.f_code.co_name != AUTOGRAD:
        found.append(frame(at.f_code.co_filename, at.f_lineno, at.f_code.co_name))
        at = at.f_back  # type: ignore[assignment]
    return found
