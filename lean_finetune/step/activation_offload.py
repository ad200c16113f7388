"""Activations kept away from the device between forward and backward (train.offload_activations).

What a layer saves for backward is copied to a store and its memory is given back; backward fetches it again, bit by
bit. The same hooks run in train, on a store of the host's, and in estimate, on one that counts.
"""

import os
import tempfile
import weakref
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule
from torch.multiprocessing.reductions import StorageWeakRef

from lean_finetune.config.field_types import OffloadActivations
from lean_finetune.core.errors import UserError
from lean_finetune.core.units import readable_size

SMALLEST_BYTES = 1024
"""Less than that stays: it is next to nothing, and a copy of it takes as long as one of 100 KB."""


class ActivationStore(Protocol):
    """Where values are while they are away. A handle's end is the end of what it stands for."""

    device: torch.device
    """Whose tensors are sent."""

    def put(self, values: torch.Tensor) -> Any:
        """Keep a copy of values of shape (n,); they may change once this returns. Returns a handle."""

    def get(self, handle: Any) -> torch.Tensor:
        """The values (n,) again, in new memory of the device."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Sent:
    """A stretch of memory that was sent away."""

    handle: Any
    storage: StorageWeakRef
    """Where it came from. While this is held, no other storage can have the same address."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _View:
    """A tensor that lies in such a stretch."""

    sent: _Sent
    size: torch.Size
    stride: tuple[int, ...]


class ActivationOffload:
    """Sends away what is saved for backward."""

    def __init__(self, store: ActivationStore):
        """Keep it in `store`."""
        self._store = store
        self._weights: set[int] = set()
        # One copy serves all that is saved of the same memory: the input of three projections is there once.
        self._sent: weakref.WeakValueDictionary[Hashable, _Sent] = weakref.WeakValueDictionary()

    @contextmanager
    def saving(self, model: nn.Module) -> Iterator[None]:
        """Inside, what is saved for backward goes away, but for the model's own weights."""
        self._know_weights(model)
        # A layer of which this process holds a part has its weights only while it computes.
        cut = [module for module in model.modules() if isinstance(module, FSDPModule)]
        hooks = [module.register_forward_pre_hook(self._know_weights) for module in cut]
        try:
            with saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            for hook in hooks:
                hook.remove()
            self._weights.clear()  # Where a weight was that is gone by then, another tensor may be.

    def _know_weights(self, module: nn.Module, args: object = None) -> None:
        """Take note of where a module's weights are now."""
        weights = chain(module.parameters(), module.buffers())
        self._weights.update(tensor.untyped_storage()._cdata for tensor in weights)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _View:
        """Send a tensor away, with what lies between its first and its last value."""
        storage = tensor.untyped_storage()
        stays = tensor.device.type != self._store.device.type or storage._cdata in self._weights
        if stays or tensor.nbytes < SMALLEST_BYTES:
            return tensor
        start = tensor.storage_offset()
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        key = (storage._cdata, tensor._version, tensor.dtype, start, extent)
        sent = self._sent.get(key)
        if sent is None:
            values = tensor.detach().as_strided((extent,), (1,), start)
            sent = _Sent(handle=self._store.put(values), storage=StorageWeakRef(storage))
            self._sent[key] = sent
        return _View(sent=sent, size=tensor.shape, stride=tensor.stride())

    def _unpack(self, saved: torch.Tensor | _View) -> torch.Tensor:
        """The tensor again, laid out as it was, so that no kernel computes otherwise."""
        if isinstance(saved, torch.Tensor):
            return saved
        return self._store.get(saved.sent.handle).as_strided(saved.size, saved.stride, 0)


def offloading(offload: ActivationOffload | None, model: nn.Module) -> AbstractContextManager[object]:
    """The context of the layers' forward pass."""
    return nullcontext() if offload is None else offload.saving(model)


class HostStore:
    """The host's memory, pinned for a GPU: copies are then made at the full speed of the link."""

    def __init__(self, device: torch.device):
        """Keep what is on `device`."""
        self.device = device

    def put(self, values: torch.Tensor) -> torch.Tensor:
        """See ActivationStore. Copies run in the stream of all kernels: in order, and not beside them."""
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=self.device.type == "cuda")
        return host.copy_(values, non_blocking=True)

    def get(self, handle: torch.Tensor) -> torch.Tensor:
        """See ActivationStore."""
        return torch.empty_like(handle, device=self.device).copy_(handle, non_blocking=True)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Place:
    """A stretch of the file."""

    start: int
    count: int
    dtype: torch.dtype


class DiskStore:
    """One file without a name: it is gone with the process, however that ends."""

    def __init__(self, device: torch.device, directory: Path):
        """Open the file in `directory`, which is made where it is missing."""
        directory.mkdir(parents=True, exist_ok=True)
        self.device, self._directory = device, directory
        self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115
        weakref.finalize(self, self._file.close)
        self._held: weakref.WeakSet[_Place] = weakref.WeakSet()
        self._end = 0

    def put(self, values: torch.Tensor) -> _Place:
        """See ActivationStore.

        Raises:
            UserError: the disk is full.
        """
        if not self._held:  # Backward has fetched all: the next micro-batch writes over it.
            self._end = 0
        place = _Place(start=self._end, count=values.numel(), dtype=values.dtype)
        left, at = values.cpu().view(torch.uint8).numpy().data, self._end
        try:
            while left:
                written = os.pwrite(self._file.fileno(), left, at)
                left, at = left[written:], at + written
        except OSError as error:
            raise UserError(
                f"train.offload_activations: disk must have room for what is sent there; {self._directory.resolve()} "
                f"had none after {readable_size(at)} ({error.strerror}); free some, or use cpu or none"
            ) from None
        self._end = at
        self._held.add(place)
        return place

    def get(self, handle: _Place) -> torch.Tensor:
        """See ActivationStore."""
        host = torch.empty(handle.count, dtype=handle.dtype)
        left, at = host.view(torch.uint8).numpy().data, handle.start
        while left:
            count = os.preadv(self._file.fileno(), [left], at)
            if not count:
                raise RuntimeError(f"the file of activations ends at {at}")
            left, at = left[count:], at + count
        return host.to(self.device)


def refuse_offload(choice: OffloadActivations, device_type: str) -> None:
    """Refuse to send activations where they are.

    Raises:
        UserError: to the memory of a CPU, from it.
    """
    if choice == "cpu" and device_type == "cpu":
        raise UserError(
            "train.offload_activations: cpu takes activations off a GPU; got cpu where training runs on the CPU; use "
            "disk or none"
        )


def make_offload(choice: OffloadActivations, device: torch.device, directory: Path) -> ActivationOffload | None:
    """What train.offload_activations asks for; files go to `directory`.

    Raises:
        UserError: it cannot have an effect on this device.
    """
    refuse_offload(choice, device.type)
    if choice == "none":
        return None
    return ActivationOffload(HostStore(device) if choice == "cpu" else DiskStore(device, directory))
