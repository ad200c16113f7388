"""Quantised weights in a model's files, read one at a time in 16 bits: MXFP4, FP8, and bitsandbytes in 4 and 8 bits.

Shape legend: a weight is N × K; E experts; G groups of a row of K values.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import EllipsisType
from typing import Any, Self

import bitsandbytes as bnb
import torch
from bitsandbytes.utils import unpack_tensor_to_dict

from lean_finetune.model.experts.packed_weights import INT8_LARGEST
from lean_finetune.model.files.safetensors_files import StoredTensor, give_back_memory

UNPACKED = torch.bfloat16
"""Type of unpacked weights."""
ROWS_AT_ONCE = 128
"""Rows of an FP8 weight that are unpacked at the same time: those of one of DeepSeek's blocks."""
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The 4-bit values of MXFP4 (OCP Microscaling Formats v1.0, section 5.3.3)."""
E8M0_VALUES = tuple(2.0**exponent for exponent in range(-127, 129))
"""The values of MXFP4's scales (section 5.4.1)."""


@dataclass(frozen=True, kw_only=True)
class QuantizedWeight:
    """A quantised weight in a model's files, not yet read."""

    packed: StoredTensor

    @property
    def path(self) -> Path:
        """The file of its packed values."""
        return self.packed.path

    @property
    def dtype(self) -> torch.dtype:
        """Type that `read` returns."""
        return UNPACKED

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape that `read` returns."""
        return self.packed.shape

    def read(self) -> torch.Tensor:
        """Read and unpack the weight.

        Raises:
            OSError: a file cannot be read.
            ValueError: scales do not fit the weight.
        """
        raise NotImplementedError

    def __getitem__(self, index: EllipsisType) -> Any:
        """What transformers loads: it indexes a lazy tensor with `...`."""
        give_back_memory()
        return self.read()


@dataclass(frozen=True, kw_only=True)
class Mxfp4Weight(QuantizedWeight):
    """A projection of all experts of gpt-oss: two 4-bit values a byte (E, N, K / 32, 16), a scale for each 32."""

    scales: StoredTensor

    @property
    def shape(self) -> tuple[int, ...]:
        """(E, K, N), as in the model."""
        experts, outputs, groups, group_bytes = self.packed.shape
        return (experts, groups * group_bytes * 2, outputs)

    def read(self) -> torch.Tensor:
        """Unpack it, an expert at a time: the values of transformers' `convert_moe_packed_tensors`, in less memory."""
        weights_EKN = torch.empty(self.shape, dtype=UNPACKED)
        for expert, weight_KN in enumerate(weights_EKN):
            weight_KN.copy_(self._expert(expert).T)
        return weights_EKN

    def rows(self, first: int, count: int) -> Self:
        """A range of its experts."""
        return replace(self, packed=self.packed.rows(first, count), scales=self.scales.rows(first, count))

    def _expert(self, expert: int) -> torch.Tensor:
        """The weight of one expert, N × K."""
        values, scales = torch.tensor(E2M1_VALUES, dtype=UNPACKED), torch.tensor(E8M0_VALUES, dtype=UNPACKED)
        # The lower half of a byte is the first value. Both are looked up together, as one integer.
        pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=1).view(torch.int32)[:, 0]
        blocks, exponents_NG = self.packed.rows(expert, 1).read()[0].int(), self.scales.rows(expert, 1).read()[0]
        weight_NGV = pairs.index_select(0, blocks.flatten()).view(UNPACKED).view(*exponents_NG.shape, -1)
        weight_NGV *= scales.index_select(0, exponents_NG.int().flatten()).view(*exponents_NG.shape, 1)
        return weight_NGV.flatten(1)


@dataclass(frozen=True, kw_only=True)
class Fp8Weight(QuantizedWeight):
    """An 8-bit floating-point weight N × K with a scale for each block, row, or for all of it.

    Blocks at the lower and right edge may be smaller (DeepSeek-V3's `weight_dequant`, inference/kernel.py), which
    transformers' `Fp8Dequantize` refuses, or scales by blocks of another size.
    """

    scales: StoredTensor
    block: tuple[int, int]
    """Rows and columns of a block, if there is more than one scale for a row."""

    def read(self) -> torch.Tensor:
        """Multiply by the scales in fp32, `ROWS_AT_ONCE` rows at a time."""
        rows, columns = self.shape
        scales = self.scales.read().float()
        scales = scales.reshape(1, 1) if scales.numel() == 1 else scales
        height, width = self._block_of(tuple(scales.shape))
        weight_NK = torch.empty(rows, columns, dtype=UNPACKED)
        for first in range(0, rows, ROWS_AT_ONCE):
            count = min(ROWS_AT_ONCE, rows - first)
            of_rows = scales[torch.arange(first, first + count) // height]
            scaled_RK = self.packed.rows(first, count).read().float()
            weight_NK[first : first + count] = scaled_RK.mul_(of_rows.repeat_interleave(width, dim=1)[:, :columns])
            del scaled_RK
        return weight_NK

    def _block_of(self, grid: tuple[int, ...]) -> tuple[int, int]:
        """Rows and columns for which one scale is; `grid` is the shape of the scales."""
        rows, columns = self.shape
        for height, width in ((rows, columns), (1, columns), self.block):
            if grid == (-(-rows // height), -(-columns // width)):
                return height, width
        raise ValueError(f"scales of shape {grid} do not fit an FP8 weight of shape {self.shape}")


@dataclass(frozen=True)
class AsStored:
    """The tensors of a weight that bitsandbytes packed, read: the packed values as `weight`, others by their names."""

    tensors: Mapping[str, torch.Tensor]

    def to(self, device: Any = None, dtype: Any = None) -> Self:
        """Move them to a device; transformers would convert a weight to `dtype`, which packed values are not."""
        return type(self)({name: tensor.to(device) for name, tensor in self.tensors.items()})

    def is_floating_point(self) -> bool:
        """Refuse the place of a weight in 16 bits, of which transformers asks this.

        Raises:
            ValueError: always.
        """
        raise ValueError("one is packed by bitsandbytes whose layer must be in 16 bits, such as the head")


@dataclass(frozen=True, kw_only=True)
class BitsAndBytesWeight(QuantizedWeight):
    """A weight that bitsandbytes packed in 4 or 8 bits."""

    state: Mapping[str, StoredTensor]
    """Its scales and code books by the last parts of their names, such as `weight.absmax` or `SCB`."""

    @cached_property
    def _format(self) -> Mapping[str, Any]:
        """How a 4-bit weight is packed; empty for 8 bits."""
        found = [tensor for name, tensor in self.state.items() if "quant_state" in name]
        return unpack_tensor_to_dict(found[0].read()) if found else {}

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight before packing."""
        return tuple(self._format.get("shape", self.packed.shape))

    def __getitem__(self, index: EllipsisType) -> AsStored:
        """The weight as it is stored."""
        give_back_memory()
        return AsStored({"weight": self.packed.read(), **{name: one.read() for name, one in self.state.items()}})

    def read(self) -> torch.Tensor:
        """Unpack it with bitsandbytes."""
        tensors = dict(self[...].tensors)
        packed = tensors.pop("weight")
        if "SCB" in tensors:
            return (packed.float() * (tensors["SCB"] / INT8_LARGEST)[:, None]).to(UNPACKED)
        state = bnb.functional.QuantState.from_dict(tensors, device=torch.device("cpu"))
        return bnb.functional.dequantize_4bit(packed, state).to(UNPACKED)
