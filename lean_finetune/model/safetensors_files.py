"""Files of tensors (safetensors), a tensor at a time: nothing is mapped, and no second copy of a file is held.

The format: the header's length (8 bytes, little-endian), the header (JSON, padded with blanks), the tensors' bytes.
"""

import ctypes
import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from types import EllipsisType

import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor

from lean_finetune.core import progress

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""A model's weights in one file, and what names the files of a model in several."""

# In the order in which safetensors' own writer puts them: the widest first, so that each tensor is aligned.
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
"""How the header's length is written."""


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor in a file: what it is, and where."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """Its first byte, counted from the file's."""

    @property
    def bytes(self) -> int:
        """Its size."""
        return prod(self.shape) * self.dtype.itemsize

    def rows(self, first: int, count: int) -> "StoredTensor":
        """Some of its rows, that is of its first dimension."""
        row_bytes = self.bytes // self.shape[0]
        return replace(self, shape=(count, *self.shape[1:]), start=self.start + first * row_bytes)

    def read(self) -> torch.Tensor:
        """The tensor, in memory of its own that PyTorch's allocator counts.

        Raises:
            OSError: the file cannot be read, or ends too soon.
        """
        tensor = torch.empty(self.shape, dtype=self.dtype)
        with open(self.path, "rb", buffering=0) as file:
            file.seek(self.start)
            left = _bytes_of(tensor)
            while left:
                count = file.readinto(left)
                if not count:
                    raise OSError(f"{self.path} ends {len(left)} bytes too soon")
                left = left[count:]
                progress.made()
        return tensor

    def __getitem__(self, index: EllipsisType) -> torch.Tensor:
        """The whole tensor: how transformers asks safetensors for what it has not read yet."""
        if index is not ...:
            raise IndexError("only whole tensors are read")
        give_back_memory()
        return self.read()


def give_back_memory() -> None:
    """Have the C library return the memory it keeps for blocks to come, where it is one that can (glibc).

    What quantising a weight needs for a moment lies between what stays of it: half as much again was left over.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file by name, none of them read.

    Raises:
        OSError: it cannot be read.
        SafetensorError: it is cut short, or its header is not one.
        ValueError: it holds a type that PyTorch has not.
    """
    # It checks that the header is well formed and the file as long as the header says. As "pt" it would map it all.
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
    """The tensors of a model's files by name, none of them read.

    Raises:
        OSError: there are no such files, or they cannot be read.
        SafetensorError: a file is cut short, or its header is not one.
        ValueError: the index is not one, or a file holds a type that PyTorch has not.
    """
    if (directory / SINGLE).is_file():
        return stored_tensors(directory / SINGLE)
    if not (directory / INDEX).is_file():
        raise OSError(f"no file named {SINGLE} or {INDEX}")
    files = json.loads((directory / INDEX).read_bytes())["weight_map"].values()
    found: dict[str, StoredTensor] = {}
    for name in sorted(set(files)):
        found.update(stored_tensors(directory / name))
    return found


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """What a header says of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]


def write_tensors(path: Path, forms: Mapping[str, TensorSpec], make: Callable[[str], torch.Tensor]) -> None:
    """Write a file tensor by tensor, the very bytes that safetensors' `save_file` writes.

    Args:
        path: the file.
        forms: every tensor's type and shape, by name.
        make: gives the tensor of a name; it is let go once it is written.

    Raises:
        OSError: the disk refused.
    """
    order = list(DTYPES.values())
    names = sorted(forms, key=lambda name: (order.index(forms[name].dtype), name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        form = forms[name]
        start, end = end, end + prod(form.shape) * form.dtype.itemsize
        header[name] = {"dtype": NAMES[form.dtype], "shape": list(form.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    with open(path, "wb") as file:
        file.write(LENGTH.pack(len(text)) + text)
        for name in names:
            tensor = make(name).detach().cpu().contiguous()
            if (tensor.dtype, tuple(tensor.shape)) != (forms[name].dtype, forms[name].shape):
                raise RuntimeError(f"{name} is not of the type and shape that were announced")
            file.write(_bytes_of(tensor))
            del tensor
            progress.made()


def write_loaded(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors that are in memory, of GPUs or of several processes; they pass through the host one by one.

    Raises:
        OSError: the disk refused.
    """
    forms = {name: TensorSpec(dtype=held.dtype, shape=tuple(held.shape)) for name, held in tensors.items()}
    write_tensors(path, forms, lambda name: _gathered(tensors[name]))


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor; one that several processes hold parts of is gathered, for which all of them have to ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return tensor.flatten().view(torch.uint8).numpy().data
