"""Replace the functions of torch.cuda that the benchmark calls, to run all of it on a CPU.

Sizes and lifetimes of tensors are real: a dispatch mode sees what each operation returns.
"""

import pickle
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cuda_memory.gpus import Device
from cuda_memory.units import GIB, MIB, round_up

FAKE_GPU = Device(name="fake GPU", kind="cuda", memory_bytes=8 * GIB, compute_capability=(9, 0))
NOT_PROVEN = (
    "that predictions are right: sizes are those of tensors on a CPU, without kernels' workspaces",
    "the allocator's segments: reserved memory is the peak rounded up",
    "times, streams, pinned memory and kernels",
    "TRL, and the tests that need a GPU: neither runs",
)
"""What a run with these functions does not prove."""
BLOCK_BYTES = 512


class FakeAllocator(TorchDispatchMode):
    """Counts the storages that operations return, as the statistics and the history of CUDA's allocator do."""

    def __init__(self) -> None:
        """Count from here on."""
        super().__init__()
        self._live: dict[int, tuple[StorageWeakRef, int, int]] = {}
        self._next_address = 0
        self.allocated = self.allocated_peak = self.reserved = 0
        self.history: list[dict[str, Any]] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count what it returned and what is gone."""
        out = func(*args, **(kwargs or {}))
        self._free_gone()
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                if storage._cdata not in self._live and storage.nbytes():
                    size = round_up(storage.nbytes(), BLOCK_BYTES)
                    self._live[storage._cdata] = (StorageWeakRef(storage), self._next_address, size)
                    self._change("alloc", self._next_address, size)
                    self._next_address += size
        return out

    def _free_gone(self) -> None:
        """Count storages that nothing references any more."""
        for key in [key for key, (storage, _, _) in self._live.items() if storage.expired()]:
            _, address, size = self._live.pop(key)
            self._change("free_completed", address, -size)

    def _change(self, action: str, address: int, change: int) -> None:
        self.allocated += change
        self.allocated_peak = max(self.allocated_peak, self.allocated)
        self.reserved = max(self.reserved, round_up(self.allocated, 2 * MIB))
        if self.history is not None:
            self.history.append({"action": action, "addr": address, "size": abs(change), "stream": 0, "frames": []})

    def reset_peaks(self, *_: object) -> None:
        """torch.cuda.reset_peak_memory_stats."""
        self._free_gone()
        self.allocated_peak = self.allocated

    def nested_statistics(self, *_: object) -> dict[str, Any]:
        """torch.cuda.memory_stats_as_nested_dict, the part that is read."""
        return {"allocated_bytes": {"all": {"current": self.allocated, "peak": self.allocated_peak}}}

    def record(self, *_: object, **__: object) -> None:
        """torch.cuda.memory._record_memory_history."""
        self.history = []

    def dump(self, filename: str) -> None:
        """torch.cuda.memory._dump_snapshot."""
        content = {"segments": [], "device_traces": [self.history or []], "allocator_settings": {}}
        Path(filename).write_bytes(pickle.dumps(content))


@contextmanager
def fake_cuda() -> Iterator[FakeAllocator]:
    """A context in which the functions of torch.cuda report a CPU's tensors."""
    counts = FakeAllocator()

    def nothing(*_: object) -> None:
        """Stand for init, synchronize and emptying the cache."""

    functions: dict[str, Any] = {
        **dict.fromkeys(("init", "synchronize", "empty_cache"), nothing),
        **dict.fromkeys(("memory_reserved", "max_memory_reserved"), lambda *_: counts.reserved),
        "memory_allocated": lambda *_: counts.allocated,
        "max_memory_allocated": lambda *_: counts.allocated_peak,
        "mem_get_info": lambda *_: (FAKE_GPU.memory_bytes - counts.reserved, FAKE_GPU.memory_bytes),
        "memory_stats_as_nested_dict": counts.nested_statistics,
        "reset_peak_memory_stats": counts.reset_peaks,
    }
    with ExitStack() as stack:
        stack.enter_context(patch.multiple("torch.cuda", **functions))
        stack.enter_context(
            patch.multiple("torch.cuda.memory", _record_memory_history=counts.record, _dump_snapshot=counts.dump)
        )
        stack.enter_context(patch.object(torch._C, "_cuda_clearCublasWorkspaces", nothing, create=True))
        yield stack.enter_context(counts)
