"""Packed weights of experts, quantized or not, and their matmuls in one kernel."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from lean_finetune.core.optional_bitsandbytes import bnb

# Weights of experts packed in 4 or 8 bits, expert by expert, as bitsandbytes packs one linear layer.
#
# bitsandbytes packs `nn.Linear` alone and leaves the three-dimensional weights of experts in 16 bits. Here the packed
# weight of a projection is one parameter, its scales are buffers of the module, and the matmul unpacks one expert at
# a time, in forward and again in backward, so that autograd saves no 16-bit copy.
#
# Shape legend: E experts; a weight is (E, N, K) or (E, K, N).

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
        nested = bnb.functional.QuantState(
            absmax=state[2][expert], code=state[3], blocksize=NESTED_BLOCK_VALUES, dtype=torch.float32
        )
        scales = bnb.functional.dequantize_blockwise(scales, nested).add_(state[1][expert])
    quantised = bnb.functional.QuantState(
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


# Matmuls of rows with the weight of their expert, as operations that a trace on fake tensors sees as one.
#
# Rows are sorted by expert; `ends_E` holds the number of rows up to the end of each expert. Time depends on how many
# rows each expert has, memory does not: the outputs have as many rows as the input, and one expert's weight at most is
# unpacked at a time.
#
# Shape legend: S rows (tokens × chosen experts), E experts, K inputs, N outputs.

GROUPED_KERNEL_MAJORS = (9, 10)
"""Major compute capabilities on which PyTorch has a grouped kernel for bf16: Hopper and data-centre Blackwell.

Elsewhere experts are multiplied one after the other (aten/src/ATen/native/cuda/GroupedBlas.cpp)."""
GROUPED_KERNEL_ALIGNMENT = 8
"""The grouped kernel needs sizes that are multiples of 16 bytes."""


def has_grouped_kernel(dtype: torch.dtype, capability: tuple[int, int]) -> bool:
    """Whether PyTorch multiplies all experts in one kernel for this type on a GPU of this compute capability."""
    return dtype == torch.bfloat16 and capability[0] in GROUPED_KERNEL_MAJORS


@torch.library.custom_op("lean_finetune::grouped_mm", mutates_args=())
def grouped_mm(rows_SK: torch.Tensor, weights_EKN: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """Each row times the weight of its expert, (S, K) × (E, K, N) → (S, N)."""
    if _in_one_kernel(rows_SK, weights_EKN):
        return torch.ops.aten._grouped_mm(rows_SK, weights_EKN, ends_E)
    out_SN = rows_SK.new_empty(len(rows_SK), weights_EKN.shape[2])
    for expert, (start, end) in enumerate(_bounds(ends_E)):
        torch.mm(rows_SK[start:end], weights_EKN[expert], out=out_SN[start:end])
    return out_SN


@grouped_mm.register_fake
def _(rows_SK: torch.Tensor, weights_EKN: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    return rows_SK.new_empty(len(rows_SK), weights_EKN.shape[2])


@torch.library.custom_op("lean_finetune::grouped_outer", mutates_args=())
def grouped_outer(left_SN: torch.Tensor, right_SK: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """The matmul of each expert's rows, (S, N) and (S, K) → (E, N, K): the gradient of the experts' weights."""
    out_ENK = left_SN.new_empty(len(ends_E), left_SN.shape[1], right_SK.shape[1])
    for expert, (start, end) in enumerate(_bounds(ends_E)):
        torch.mm(left_SN[start:end].t(), right_SK[start:end], out=out_ENK[expert])  # Zero for an expert without rows.
    return out_ENK


@grouped_outer.register_fake
def _(left_SN: torch.Tensor, right_SK: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    return left_SN.new_empty(len(ends_E), left_SN.shape[1], right_SK.shape[1])


@torch.library.custom_op("lean_finetune::packed_grouped_mm", mutates_args=())
def packed_grouped_mm(
    rows_SK: torch.Tensor,
    packed: torch.Tensor,
    state: list[torch.Tensor],
    ends_E: torch.Tensor,
    shape: list[int],
    quant_type: str,
    transpose: bool,
) -> torch.Tensor:
    """As `grouped_mm` with packed weights of `shape` (E, K, N), or (E, N, K) if `transpose`; unpacks one at a time."""
    out_SN = rows_SK.new_empty(len(rows_SK), shape[1 if transpose else 2])
    for expert, (start, end) in enumerate(_bounds(ends_E)):
        if start == end:
            continue
        weight = unpack_expert(packed, state, expert, shape, quant_type, rows_SK.dtype)
        torch.mm(rows_SK[start:end], weight.t() if transpose else weight, out=out_SN[start:end])
        del weight
    return out_SN


@packed_grouped_mm.register_fake
def _(
    rows_SK: torch.Tensor,
    packed: torch.Tensor,
    state: list[torch.Tensor],
    ends_E: torch.Tensor,
    shape: list[int],
    quant_type: str,
    transpose: bool,
) -> torch.Tensor:
    return rows_SK.new_empty(len(rows_SK), shape[1 if transpose else 2])


GROUPED_MATMULS = (
    torch.ops.lean_finetune.grouped_mm.default,
    torch.ops.lean_finetune.packed_grouped_mm.default,
)
"""Matmuls of rows, their first argument, with the weights of their experts."""


def _bounds(ends_E: torch.Tensor) -> list[tuple[int, int]]:
    """First and last row (exclusive) of each expert, on the host."""
    ends = ends_E.tolist()
    return list(zip([0, *ends], ends, strict=False))


def _in_one_kernel(rows_SK: torch.Tensor, weights_EKN: torch.Tensor) -> bool:
    """Whether PyTorch's grouped kernel can multiply these."""
    if rows_SK.device.type != "cuda":
        return False
    sizes = (*weights_EKN.shape[1:],)
    aligned = all(size % GROUPED_KERNEL_ALIGNMENT == 0 for size in sizes) and 1 in weights_EKN.stride()[1:]
    return aligned and has_grouped_kernel(rows_SK.dtype, torch.cuda.get_device_capability(rows_SK.device))


class _GroupedLinear(torch.autograd.Function):
    """Linear layers of experts. Nothing is saved for frozen weights; packed ones are unpacked again in backward."""

    @staticmethod
    def forward(
        ctx: Any, rows_SK: torch.Tensor, weights: torch.Tensor, ends_E: torch.Tensor, transposed: bool, packing: Any
    ) -> torch.Tensor:
        ctx.transposed, ctx.packing = transposed, packing
        ctx.save_for_backward(rows_SK if weights.requires_grad else None, weights, ends_E)
        return _product(rows_SK, weights, ends_E, not transposed, packing)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads_SN: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows_SK, weights, ends_E = ctx.saved_tensors
        grads_SN = grads_SN.contiguous()
        grad_rows = grad_weights = None
        if ctx.needs_input_grad[0]:
            grad_rows = _product(grads_SN, weights, ends_E, ctx.transposed, ctx.packing)
        if ctx.needs_input_grad[1]:
            pair = (rows_SK, grads_SN) if ctx.transposed else (grads_SN, rows_SK)
            grad_weights = grouped_outer(*pair, ends_E)
        return grad_rows, grad_weights, None, None, None


def _product(
    rows_SK: torch.Tensor, weights: torch.Tensor, ends_E: torch.Tensor, transpose: bool, packing: PackedWeights | None
) -> torch.Tensor:
    """Rows times weights, which are plain or packed."""
    if packing is None:
        return cast(torch.Tensor, grouped_mm(rows_SK, weights.transpose(1, 2) if transpose else weights, ends_E))
    return cast(
        torch.Tensor,
        packed_grouped_mm(rows_SK, weights, packing.state, ends_E, list(packing.shape), packing.quant_type, transpose),
    )


def grouped_linear(
    rows_SK: torch.Tensor,
    weights: torch.Tensor,
    ends_E: torch.Tensor,
    *,
    transposed: bool,
    packing: PackedWeights | None = None,
) -> torch.Tensor:
    """Apply each row's expert, with gradients of the rows and of trained weights.

    Args:
        rows_SK: sorted by expert.
        weights: (E, N, K), or (E, K, N) if `transposed`; packed if `packing` is given.
        ends_E: int32, rows up to the end of each expert.
        transposed: layout of the weights.
        packing: how the weights are packed.
    """
    return cast(torch.Tensor, _GroupedLinear.apply(rows_SK.contiguous(), weights, ends_E, transposed, packing))


class _Dispatch(torch.autograd.Function):
    """Copy each token to the rows of its experts: (T, D) → (S, D). Backward sums copies in a fixed order."""

    @staticmethod
    def forward(ctx: Any, tokens_TD: torch.Tensor, order_S: torch.Tensor, row_of_S: torch.Tensor) -> torch.Tensor:
        ctx.tokens = len(tokens_TD)
        ctx.save_for_backward(row_of_S)
        return tokens_TD.index_select(0, order_S // (len(order_S) // ctx.tokens))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads_SD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (row_of_S,) = ctx.saved_tensors
        grads_TCD = grads_SD.index_select(0, row_of_S).view(ctx.tokens, -1, grads_SD.shape[1])
        return grads_TCD.sum(1), None, None


class _Combine(torch.autograd.Function):
    """Sum each token's rows by their weights: (S, D), (T, C) → (T, D), for C chosen experts a token."""

    @staticmethod
    def forward(
        ctx: Any, rows_SD: torch.Tensor, weights_TC: torch.Tensor, order_S: torch.Tensor, row_of_S: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(rows_SD, weights_TC, order_S, row_of_S)
        rows_TCD = rows_SD.index_select(0, row_of_S).view(*weights_TC.shape, -1)
        return torch.bmm(weights_TC[:, None], rows_TCD)[:, 0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads_TD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows_SD, weights_TC, order_S, row_of_S = ctx.saved_tensors
        grad_rows = grad_weights = None
        if ctx.needs_input_grad[1]:
            rows_TCD = rows_SD.index_select(0, row_of_S).view(*weights_TC.shape, -1)
            grad_weights = torch.bmm(rows_TCD, grads_TD[:, :, None])[:, :, 0]
            del rows_TCD
        if ctx.needs_input_grad[0]:
            grad_rows = grads_TD.index_select(0, order_S // weights_TC.shape[1])
            grad_rows *= weights_TC.flatten().index_select(0, order_S)[:, None]
        return grad_rows, grad_weights, None, None


def dispatch(tokens_TD: torch.Tensor, order_S: torch.Tensor, row_of_S: torch.Tensor) -> torch.Tensor:
    """Copy tokens to rows sorted by expert, (T, D) → (S, D).

    Args:
        tokens_TD: hidden states.
        order_S: for each row, its number in the order token by token.
        row_of_S: the inverse permutation.
    """
    return cast(torch.Tensor, _Dispatch.apply(tokens_TD, order_S, row_of_S))


def combine(
    rows_SD: torch.Tensor, weights_TC: torch.Tensor, order_S: torch.Tensor, row_of_S: torch.Tensor
) -> torch.Tensor:
    """Sum the rows of each token by the router's weights, (S, D) → (T, D); arguments as in `dispatch`."""
    return cast(torch.Tensor, _Combine.apply(rows_SD, weights_TC.to(rows_SD.dtype), order_S, row_of_S))
