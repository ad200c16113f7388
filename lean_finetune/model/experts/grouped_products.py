"""Products of rows with the weight of their expert, as operations that a trace on fake tensors sees as one.

Rows are sorted by expert; `ends_E` holds the number of rows up to the end of each expert. Time depends on how many rows
each expert has, memory does not: the outputs have as many rows as the input, and one expert's weight at most is
unpacked at a time.

Shape legend: S rows (tokens × chosen experts), E experts, K inputs, N outputs.
"""

from typing import Any, cast

import torch
from torch.autograd.function import once_differentiable

from lean_finetune.model.experts.packed_weights import PackedWeights, unpack_expert

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
    """The products of each expert's rows, (S, N) and (S, K) → (E, N, K): the gradient of the experts' weights."""
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


GROUPED_PRODUCTS = (
    torch.ops.lean_finetune.grouped_mm.default,
    torch.ops.lean_finetune.packed_grouped_mm.default,
)
"""Products of rows, their first argument, with the weights of their experts."""


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
