"""Weights of experts packed in 4 or 8 bits, expert by expert, as bitsandbytes packs one linear layer.

bitsandbytes packs `nn.Linear` alone and leaves the three-dimensional weights of experts in 16 bits. Here the packed
weight of a projection is one parameter, its scales are buffers of the module, and the product unpacks one expert at a
time, in forward and again in backward, so that autograd saves no 16-bit copy.

Shape legend: E experts; a weight is (E, N, K) or (E, K, N).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import bitsandbytes as bnb
import torch
from bitsandbytes.functional import QuantState
from torch import nn

BLOCK_WEIGHTS = 64
NESTED_BLOCK_VALUES = 256
LEVELS_4BIT = 16
BYTE_LEVELS = 256
FP32_BYTES = 4
INT8 = "int8"
INT8_LARGEST = 127
PACKINGS = "_packings"
"""Attribute of a module: how its packed parameters are packed, by name."""
SCALES = "_scales_to_register"
"""Attribute of a module: scales that are not yet buffers, by name."""
STATE_NAMES = ("scales", "scale_offset", "scale_scales", "scale_levels")
"""Buffers of a packed parameter, after its name: scales of blocks or rows; and, if these are quantised too, their
offset, the scales of their blocks, and the values of their levels."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedWeights:
    """How a parameter is packed."""

    shape: tuple[int, ...]
    """Of the weight: experts first."""
    quant_type: str
    """nf4, fp4 or int8."""
    state: list[torch.Tensor]
    """Scales, in the order of `STATE_NAMES`."""


@dataclass(frozen=True, kw_only=True)
class _Format:
    """What does not change when a packed module moves to another device."""

    shape: tuple[int, ...]
    quant_type: str
    buffers: tuple[str, ...]


def packing_of(module: nn.Module, name: str) -> PackedWeights | None:
    """How a parameter is packed; None if it is not."""
    packing: _Format | None = getattr(module, PACKINGS, {}).get(name)
    if packing is None:
        return None
    state = [module.get_buffer(buffer) for buffer in packing.buffers]
    return PackedWeights(shape=packing.shape, quant_type=packing.quant_type, state=state)


def pack_parameter(module: nn.Module, name: str, weight: torch.Tensor, quant_type: str, *, double_quant: bool) -> None:
    """Replace a parameter by its packed form; expert by expert, so that temporary memory stays small.

    Call `register_scales` when all parameters of the model are there.

    Args:
        module: of the experts.
        name: of the parameter.
        weight: its values, on the device to pack on; may be on the meta device.
        quant_type: nf4, fp4 or int8.
        double_quant: quantise the scales of 4-bit blocks as well.
    """
    pack = _pack_int8 if quant_type == INT8 else _pack_4bit
    packed, state = pack(weight.detach(), quant_type, double_quant)
    parameter: Any = nn.Parameter(packed, requires_grad=False)
    parameter.ds_shape = weight.shape  # peft reads the shape of a parameter that is not there in full from this name.
    buffers = tuple(f"{name}_{suffix}" for suffix in STATE_NAMES[: len(state)])
    packings = {**getattr(module, PACKINGS, {})}
    packings[name] = _Format(shape=tuple(weight.shape), quant_type=quant_type, buffers=buffers)
    setattr(module, PACKINGS, packings)
    setattr(module, SCALES, {**getattr(module, SCALES, {}), **dict(zip(buffers, state, strict=True))})
    module._parameters[name] = parameter


def register_scales(model: nn.Module) -> None:
    """Make the scales of packed parameters buffers, after loading: transformers empties buffers it did not read."""
    for module in packed_modules(model):
        # In one order, whatever the order of reading: processes send them to each other in it.
        for name, tensor in sorted(module.__dict__.pop(SCALES, {}).items()):
            module.register_buffer(name, tensor, persistent=False)


Packed = tuple[torch.Tensor, list[torch.Tensor]]


def _pack_4bit(weight: torch.Tensor, quant_type: str, double_quant: bool) -> Packed:
    """uint8 of shape (E, bytes of an expert), and its scales."""
    experts, values = len(weight), prod(weight.shape[1:])
    blocks = -(-values // BLOCK_WEIGHTS)
    nested_blocks = -(-blocks // NESTED_BLOCK_VALUES)
    packed = weight.new_empty(experts, -(-values // 2), dtype=torch.uint8)
    scales = weight.new_empty(experts, blocks, dtype=torch.uint8 if double_quant else torch.float32)
    state = [scales]
    if double_quant:
        state += [
            weight.new_empty(experts, dtype=torch.float32),
            weight.new_empty(experts, nested_blocks, dtype=torch.float32),
            weight.new_empty(BYTE_LEVELS, dtype=torch.float32),
        ]
    for expert in range(experts if weight.device.type != "meta" else 0):
        one, quantised = bnb.functional.quantize_4bit(
            weight[expert].contiguous(), compress_statistics=double_quant, quant_type=quant_type
        )
        packed[expert] = one.flatten()
        scales[expert] = quantised.absmax
        if double_quant:
            state[1][expert], state[2][expert] = quantised.offset, quantised.state2.absmax
            state[3].copy_(quantised.state2.code)
    return packed, state


def _pack_int8(weight: torch.Tensor, quant_type: str, double_quant: bool) -> Packed:
    """int8 of the weight's shape, and the scale of each of its rows."""
    packed = torch.empty_like(weight, dtype=torch.int8)
    scales = weight.new_empty(weight.shape[:2], dtype=torch.float32)
    for expert in range(len(weight) if weight.device.type != "meta" else 0):
        packed[expert], scales[expert], _ = bnb.functional.int8_vectorwise_quant(weight[expert].half(), threshold=0.0)
    return packed, [scales]


def unpack_expert(
    packed: torch.Tensor, state: list[torch.Tensor], expert: int, shape: list[int], quant_type: str, dtype: torch.dtype
) -> torch.Tensor:
    """The weight of one expert."""
    if quant_type == INT8:
        return packed[expert].float().mul_((state[0][expert] / INT8_LARGEST)[:, None]).to(dtype)
    scales = state[0][expert]
    if len(state) > 1:
        nested = QuantState(absmax=state[2][expert], code=state[3], blocksize=NESTED_BLOCK_VALUES, dtype=torch.float32)
        scales = bnb.functional.dequantize_blockwise(scales, nested).add_(state[1][expert])
    quantised = QuantState(
        absmax=scales, shape=torch.Size(shape[1:]), dtype=dtype, blocksize=BLOCK_WEIGHTS, quant_type=quant_type
    )
    return bnb.functional.dequantize_4bit(packed[expert][:, None], quantised)


def unpacked_bytes(state: list[torch.Tensor], shape: list[int], quant_type: str, dtype: torch.dtype) -> int:
    """Temporary bytes of `unpack_expert`: the weight, in 8 bits also in fp32; and its scales in fp32."""
    scales = FP32_BYTES * state[0].shape[1]
    if quant_type == INT8:
        return prod(shape[1:]) * (FP32_BYTES + (dtype.itemsize if dtype != torch.float32 else 0))
    return prod(shape[1:]) * dtype.itemsize + (scales if len(state) > 1 else 0)


def packed_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Modules with packed parameters."""
    return (module for module in model.modules() if hasattr(module, PACKINGS))
