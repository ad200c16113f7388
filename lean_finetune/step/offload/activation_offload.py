"""Store what backward needs elsewhere, or in 8 bits."""

import os
import tempfile
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
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

from cuda_memory.units import readable_size
from lean_finetune.config.field_types import CompressActivations, OffloadActivations
from lean_finetune.core.atomic_files import write_errors
from lean_finetune.core.errors import UserError
from lean_finetune.step.offload.disk_weights import DiskFault

# Store floating-point values in 8 bits with an fp32 scale per block (train.compress_activations).
#
# n values have n codes and ⌈n / 128⌉ scales. A block's largest absolute value maps to the largest code: absmax
# quantisation by blocks (Dettmers et al. 2022, arXiv 2110.02861, section 2.1). The functions are operations, so that a
# trace sees one call instead of several for each chunk.

CODES = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}
"""Type of the codes, and their largest value."""
BLOCK = 128
"""Values that share a scale."""
CHUNK = BLOCK * 2**15
"""Values that are converted at a time: 16 MiB in fp32."""


@torch.library.custom_op("lean_finetune::compress", mutates_args=())
def compress(values: torch.Tensor, bits: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (n,) and fp32 scales of values (n,); `bits` is int8 or fp8. A block with an inf or NaN becomes NaN."""
    codes, scales = _new_codes(values, bits)
    for part, part_codes, part_scales in _chunks(values, codes, scales):
        scaled = part.to(torch.float32, copy=True)
        torch.linalg.vector_norm(scaled, float("inf"), dim=1, keepdim=True, out=part_scales)
        # The smallest normal number, so that a block of zeros is not divided by zero.
        part_scales.div_(CODES[bits][1]).clamp_(min=torch.finfo(torch.float32).tiny)
        scaled.div_(part_scales)
        part_codes.copy_(scaled.round_() if bits == "int8" else scaled)
    return codes, scales


@compress.register_fake
def _new_codes(values: torch.Tensor, bits: str) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.empty_like(values, dtype=CODES[bits][0])
    return codes, torch.empty(-(-values.numel() // BLOCK), dtype=torch.float32, device=values.device)


@torch.library.custom_op("lean_finetune::decompress", mutates_args=())
def decompress(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values (n,) of codes and scales, in this type."""
    values = _new_values(codes, scales, dtype)
    for part, part_codes, part_scales in _chunks(values, codes, scales):
        part.copy_(part_codes.to(torch.float32).mul_(part_scales))
    return values


@decompress.register_fake
def _new_values(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_like(codes, dtype=dtype)


def chunk_bytes(values: torch.Tensor, *rest: object) -> int:
    """Bytes of the largest chunk in fp32, which exist inside both operations."""
    return min(values.numel(), CHUNK) * 4


def _chunks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Views of two tensors (n,) as (b, 128) and of scales as (b, 1), a chunk at a time; the last block may be short."""
    *values, scales = tensors
    whole, rest = divmod(values[0].numel(), BLOCK)
    blocks = [*(each[: whole * BLOCK].view(whole, BLOCK) for each in values), scales[:whole].view(whole, 1)]
    if whole:
        yield from zip(*(each.split(CHUNK // BLOCK) for each in blocks), strict=True)
    if rest:
        yield (*(each[whole * BLOCK :].view(1, rest) for each in values), scales[whole:].view(1, 1))


# Saved activations between forward and backward: off the device, in 8 bits, or both.
#
# Hooks replace each tensor that a layer saves for backward. train.offload_activations copies it to a store, and
# backward copies it back bit by bit; train.compress_activations rounds it to 8 bits first. Train uses a store in host
# memory or on disk, and estimate uses one that counts bytes.

SMALLEST_BYTES = 1024
"""Smaller tensors stay on the device: copying one takes as long as copying 100 KB."""
CASTS = {"TBackward0", "ToCopyBackward0", "TransposeBackward0", "ViewBackward0", "RegisterPostBackwardFunctionBackward"}
"""Autograd nodes between a weight and the copy or view of it that a matmul saves. The last is FSDP2's: it returns the
inputs of a sharded layer, and those of the first layer may be a leaf too."""


class ActivationStore(Protocol):
    """Where offloaded values are. When a handle is garbage collected, its values are too."""

    device: torch.device
    """The device whose tensors are offloaded."""

    def put(self, values: torch.Tensor) -> Any:
        """Store a copy of values of shape (n,) and return a handle; the caller may change `values` afterwards."""

    def get(self, handle: Any) -> torch.Tensor:
        """The values (n,) in new memory on the device."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _StoredRange:
    """A range of memory that was replaced."""

    handles: Sequence[Any]
    """What the store returned for its values, or for their codes and scales; without a store, the tensors."""
    compressed_from: torch.dtype | None
    """Type of the values before compression; None if they are not compressed."""
    storage: StorageWeakRef
    """Its original storage. While this reference lives, no other storage can have the same address."""


_View = tuple[_StoredRange, torch.Size, tuple[int, ...], int]
"""A tensor inside such a range: its size, stride and offset."""


class KeptActivations:
    """Where tensors that are saved for backward are: on the device, as they are; the base class of other places."""

    def saving(self, model: nn.Module) -> AbstractContextManager[None]:
        """The context of a forward pass."""
        return nullcontext()


KEPT = KeptActivations()


class ActivationOffload(KeptActivations):
    """Offload or compress the tensors that are saved for backward."""

    def __init__(
        self,
        store: ActivationStore | None,
        compression: CompressActivations = "none",
        restoring: Callable[[], AbstractContextManager[object]] = nullcontext,
    ):
        """Without a `store`, compressed tensors stay on the device. Run backward inside `restoring()`."""
        self._store, self._compression, self._restoring = store, compression, restoring
        self._weights: set[int] = set()
        # Tensors that share memory share a copy: the input of three projections is stored once.
        self._stored: weakref.WeakValueDictionary[Hashable, _StoredRange] = weakref.WeakValueDictionary()

    @contextmanager
    def saving(self, model: nn.Module) -> Iterator[None]:
        """A context in which what is saved for backward is offloaded or compressed, except the model's weights."""
        self._note_weights(model)
        # A sharded layer has its full weights only while it computes.
        sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        hooks = [module.register_forward_pre_hook(self._note_weights) for module in sharded]
        try:
            with saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            for hook in hooks:
                hook.remove()
            self._weights.clear()  # Another tensor may reuse the address of a freed weight.

    def _note_weights(self, module: nn.Module, args: object = None) -> None:
        """Remember the storages of a module's weights."""
        weights = chain(module.parameters(), module.buffers())
        self._weights.update(tensor.untyped_storage()._cdata for tensor in weights)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _View:
        """Replace the memory from a tensor's first value to its last; if it is compressed, its whole storage."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._weights or tensor.nbytes < SMALLEST_BYTES:
            return tensor
        compressed = self._compression != "none" and _is_activation(tensor)
        if not compressed and (self._store is None or tensor.device.type != self._store.device.type):
            return tensor
        start, offset = tensor.storage_offset(), 0
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if compressed:  # Once for all slices of one tensor, such as the halves of a gated MLP.
            start, offset, extent = 0, start, storage.nbytes() // tensor.itemsize
        # The version too: after a change in place the same address has other values.
        key = (storage._cdata, tensor._version, tensor.dtype, start, extent, compressed)
        stored = self._stored.get(key)
        if stored is None:
            values = tensor.detach().as_strided((extent,), (1,), start)
            stored = self._stored[key] = self._store_values(values, compressed, storage)
        return stored, tensor.shape, tensor.stride(), offset

    def _store_values(self, values: torch.Tensor, compressed: bool, storage: torch.UntypedStorage) -> _StoredRange:
        parts: Sequence[Any] = compress(values, self._compression) if compressed else (values,)
        if self._store is not None:
            parts = [self._store.put(part) for part in parts]
        dtype = values.dtype if compressed else None
        return _StoredRange(handles=parts, compressed_from=dtype, storage=StorageWeakRef(storage))

    def _unpack(self, saved: torch.Tensor | _View) -> torch.Tensor:
        """The tensor in its original layout, so that every kernel computes the same bits."""
        if isinstance(saved, torch.Tensor):
            return saved
        stored, size, stride, offset = saved
        with self._restoring():
            parts = [handle if self._store is None else self._store.get(handle) for handle in stored.handles]
            if stored.compressed_from is not None:
                parts = [decompress(*parts, stored.compressed_from)]
        return parts[0].as_strided(size, stride, offset)


def _is_activation(tensor: torch.Tensor) -> bool:
    """Whether a saved tensor is a layer's activation that 8 bits can represent.

    Not masks, positions or statistics of fused attention (they need no gradient), not statistics of norms (one value
    per token), and not copies of trained weights in another type.
    """
    if not tensor.requires_grad or not tensor.is_floating_point() or tensor.itemsize == 1 or tensor.shape[-1] == 1:
        return False
    node = tensor.grad_fn
    while node is not None and node.name() in CASTS:
        node = node.next_functions[0][0]
    return node is not None and node.name() != "torch::autograd::AccumulateGrad"


class HostStore:
    """A store in host memory, pinned for a GPU so that copies use the full bandwidth of the link."""

    def __init__(self, device: torch.device):
        self.device = device

    def put(self, values: torch.Tensor) -> torch.Tensor:
        """See ActivationStore. Copies run in the compute stream: in order, and never in parallel with a kernel."""
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=self.device.type == "cuda")
        return host.copy_(values, non_blocking=True)

    def get(self, handle: torch.Tensor) -> torch.Tensor:
        """See ActivationStore."""
        return torch.empty_like(handle, device=self.device).copy_(handle, non_blocking=True)


@dataclass(frozen=True, kw_only=True, eq=False)
class _FileRange:
    """A range of the file."""

    start: int
    count: int
    dtype: torch.dtype


class DiskStore:
    """A store in an unnamed file, which disappears with the process however that ends."""

    def __init__(self, device: torch.device, directory: Path):
        """Open the file in `directory`, creating the directory if needed; raises UserError if that cannot be."""
        self.device, self._directory = device, directory
        with write_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115
        weakref.finalize(self, self._file.close)
        self._used: weakref.WeakSet[_FileRange] = weakref.WeakSet()
        self._end = 0

    def put(self, values: torch.Tensor) -> _FileRange:
        """See ActivationStore; raises DiskFault if the disk is full."""
        if not self._used:  # Backward has read everything: the next micro-batch overwrites the file.
            self._end = 0
        place = _FileRange(start=self._end, count=values.numel(), dtype=values.dtype)
        left, at = values.cpu().view(torch.uint8).numpy().data, self._end
        try:
            # One call may write only a part.
            while left:
                written = os.pwrite(self._file.fileno(), left, at)
                left, at = left[written:], at + written
        except OSError as error:
            raise DiskFault(
                f"train.offload_activations: disk must have room for the activations; "
                f"{self._directory.resolve()} had none after {readable_size(at)} ({error.strerror}); free some, or use "
                "cpu or none"
            ) from None
        self._end = at
        self._used.add(place)
        return place

    def get(self, handle: _FileRange) -> torch.Tensor:
        """See ActivationStore."""
        host = torch.empty(handle.count, dtype=handle.dtype)
        left, at = host.view(torch.uint8).numpy().data, handle.start
        while left:
            count = os.preadv(self._file.fileno(), [left], at)
            if not count:
                raise RuntimeError(f"the activation file ends at {at}")
            left, at = left[count:], at + count
        return host.to(self.device)


def refuse_offload(choice: OffloadActivations, device_type: str) -> None:
    """Raise UserError if activations would be offloaded to the memory where they already are."""
    if choice == "cpu" and device_type == "cpu":
        raise UserError(
            "train.offload_activations: cpu takes activations off a GPU; got cpu where training runs on the CPU; use "
            "disk or none"
        )


def make_offload(
    choice: OffloadActivations, compression: CompressActivations, device: torch.device, directory: Path
) -> KeptActivations:
    """Build what train.offload_activations and compress_activations set; raises as above.

    `disk` has its file in `directory`.
    """
    refuse_offload(choice, device.type)
    if choice == compression == "none":
        return KEPT
    stores: dict[str, Callable[[], ActivationStore]] = {
        "cpu": lambda: HostStore(device),
        "disk": lambda: DiskStore(device, directory),
    }
    return ActivationOffload(stores[choice]() if choice in stores else None, compression)
