"""Read and write safetensors files one tensor at a time, without memory maps and without a second copy.

The format: the header's length (8 bytes, little-endian), the header (JSON, padded with blanks), the tensors' bytes.
"""

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from types import EllipsisType
from typing import Protocol

import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor

from lean_finetune.core import progress
from lean_finetune.core.regular_files import refuse_irregular
from lean_finetune.core.systems import malloc_function
from lean_finetune.pinning.config_file import MOST_INDEX_BYTES, json_object
from lean_finetune.pinning.model_files import INDEX, WEIGHTS, check_weights, shard_names

# In the order of safetensors' own writer: widest first, so that each tensor is aligned.
DTYPES: Mapping[str, torch.dtype] = {
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "U32": torch.uint32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
HEADER_ALIGNMENT = 8
LENGTH = struct.Struct("<Q")
"""Encoding of the header's length."""


class LazyTensor(Protocol):
    """A tensor that is not yet read."""

    @property
    def dtype(self) -> torch.dtype:
        """Type that `read` returns."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape that `read` returns."""

    def read(self) -> torch.Tensor:
        """Read it into new memory."""


class FileTensor(LazyTensor, Protocol):
    """A tensor of a model's files that is read on demand, as stored or unpacked."""

    @property
    def path(self) -> Path:
        """Its file."""


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor in a file, not yet read."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """Offset of its first byte in the file."""

    @property
    def bytes(self) -> int:
        """Its size in bytes."""
        return prod(self.shape) * self.dtype.itemsize

    def rows(self, first: int, count: int) -> "StoredTensor":
        """A range of its rows (first dimension)."""
        row_bytes = self.bytes // self.shape[0]
        return replace(self, shape=(count, *self.shape[1:]), start=self.start + first * row_bytes)

    def read(self) -> torch.Tensor:
        """Read the tensor into new memory that PyTorch's allocator counts.

        Raises:
            OSError: the file cannot be read, or ends too soon.
        """
        tensor = torch.empty(self.shape, dtype=self.dtype)
        with open(self.path, "rb", buffering=0) as file:
            file.seek(self.start)
            left = bytes_of(tensor)
            while left:
                count = file.readinto(left)
                if not count:
                    raise OSError(f"{self.path} ends {len(left)} bytes too soon")
                left = left[count:]
                progress.report()
        return tensor

    def __getitem__(self, index: EllipsisType) -> torch.Tensor:
        """Read the tensor: transformers indexes a lazy tensor with `...`."""
        if index is not ...:
            raise IndexError("only complete tensors can be read")
        give_back_memory()
        return self.read()


def give_back_memory() -> None:
    """Return free heap memory to the system, with glibc.

    Quantising leaves freed temporary memory between packed weights: half as much again as the weights.
    """
    trim = malloc_function("malloc_trim")
    if trim is not None:
        trim(0)


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file by name, not yet read.

    Raises:
        OSError: it cannot be read.
        SafetensorError: it is truncated, or its header is invalid.
        ValueError: it has a type that PyTorch does not have.
    """
    refuse_irregular(path)
    # This checks the header and the length of the file; with "pt" it would map the file.
    with safe_open(path, framework="np"):
        pass
    with open(path, "rb") as file:
        (length,) = LENGTH.unpack(file.read(LENGTH.size))
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"{path.name}: {name} is of type {entry['dtype']}, which is not supported")
        found[name] = StoredTensor(
            path=path,
            dtype=DTYPES[entry["dtype"]],
            shape=tuple(entry["shape"]),
            start=LENGTH.size + length + entry["data_offsets"][0],
        )
    return found


def model_tensors(directory: Path) -> dict[str, StoredTensor]:
    """The tensors of a model's files by name, not yet read.

    Raises:
        OSError: there are no such files, or they cannot be read.
        SafetensorError: a file is truncated, or its header is invalid.
        UserError: the index is damaged.
        ValueError: a file has a type that PyTorch does not have.
    """
    if not any((directory / name).is_file() for name in (WEIGHTS, INDEX)):
        raise OSError(f"no file named {WEIGHTS} or {INDEX}")
    found: dict[str, StoredTensor] = {}
    for name in shard_names(directory):  # As pinned.
        found.update(stored_tensors(directory / name))
    return found


def stored_names(directory: Path) -> set[str]:
    """The names of a model's tensors in its files, without reading shards; none without an index or a single file.

    Raises:
        UserError: the index or the file is damaged.
    """
    if (directory / INDEX).is_file():
        shard_names(directory)  # Checks it.
        return {*json_object(directory / INDEX, MOST_INDEX_BYTES)["weight_map"]}
    if not (directory / WEIGHTS).is_file():
        return set()
    check_weights(directory / WEIGHTS)
    with safe_open(directory / WEIGHTS, framework="np") as file:
        return {*file.keys()}


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """Type and shape of a tensor in a header."""

    dtype: torch.dtype
    shape: tuple[int, ...]


def write_tensors(path: Path, specs: Mapping[str, TensorSpec], make: Callable[[str], torch.Tensor]) -> None:
    """Write a file tensor by tensor, with the same bytes as safetensors' `save_file`.

    Args:
        path: the file.
        specs: every tensor's type and shape, by name.
        make: returns the tensor of a name; it is freed once it is written.

    Raises:
        OSError: the disk refused.
    """
    order = list(DTYPES.values())
    names = sorted(specs, key=lambda name: (order.index(specs[name].dtype), name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        spec = specs[name]
        start, end = end, end + prod(spec.shape) * spec.dtype.itemsize
        header[name] = {"dtype": NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    with open(path, "wb") as file:
        file.write(LENGTH.pack(len(text)) + text)
        for name in names:
            tensor = make(name).detach().cpu().contiguous()
            if (tensor.dtype, tuple(tensor.shape)) != (specs[name].dtype, specs[name].shape):
                raise RuntimeError(f"{name} is not of the announced type and shape")
            file.write(bytes_of(tensor))
            del tensor
            progress.report()


def write_loaded(
    path: Path, tensors: Mapping[str, torch.Tensor | LazyTensor], stored: Mapping[str, FileTensor] | None = None
) -> None:
    """Write tensors in memory, on GPUs or sharded over processes, and others from files; one by one on the host.

    Raises:
        OSError: the disk refused, or a file cannot be read.
    """
    every: dict[str, torch.Tensor | LazyTensor] = {**tensors, **(stored or {})}
    specs = {name: TensorSpec(dtype=one.dtype, shape=tuple(one.shape)) for name, one in every.items()}
    write_tensors(path, specs, lambda name: _gathered(every[name]))


def _gathered(tensor: torch.Tensor | LazyTensor) -> torch.Tensor:
    """The tensor; a sharded one is gathered, which all processes must do together."""
    if not isinstance(tensor, torch.Tensor):
        return tensor.read()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return tensor.flatten().view(torch.uint8).numpy().data
