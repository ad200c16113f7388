"""Traceable versions of bitsandbytes' LLM.int8() kernels, for CUDA and for the CPU.

Outlier columns depend on the data, so none are assumed. The few there are (about 0.1 % of columns, arXiv 2208.07339,
section 4) would add a copy of their values and weights.

Shape legend: inputs are M × K, a weight N × K. Sources: bitsandbytes' backends/{default,cuda}/ops.py.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from bitsandbytes.autograd import _functions as bnb_autograd

bnb = torch.ops.bitsandbytes
LARGEST = 127.0
PER_PRODUCT = 1.0 / LARGEST**2

Quantised = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def int8_expansions(*, cuda: bool) -> dict[Any, Callable[..., Any]]:
    """Functions to trace instead of bitsandbytes' operations."""
    return {
        bnb.int8_vectorwise_quant.default: _quantise_cuda if cuda else _quantise_cpu,
        bnb.int8_mixed_scaled_mm.default: _mixed_product,
        bnb.int8_scaled_mm.default: _product,
        bnb.int8_mm_dequant.default: _dequantise_cuda if cuda else _dequantise_cpu,
    }


@contextmanager
def int8_training_as_on_cuda() -> Iterator[None]:
    """Multiply in 8 bits while training; for CPU tensors bitsandbytes would dequantise the weight instead."""
    unpacking = bnb_autograd.MatMul8bitFp
    bnb_autograd.MatMul8bitFp = bnb_autograd.MatMul8bitLt  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        bnb_autograd.MatMul8bitFp = unpacking  # type: ignore[misc]


def _no_outliers(inputs_MK: torch.Tensor, threshold: float) -> torch.Tensor | None:
    """The search for outliers, which finds none."""
    if threshold <= 0.0:
        return None
    inputs_MK.abs() >= threshold  # noqa: B015 (for its memory)
    return inputs_MK.new_empty(0, dtype=torch.int64)


def _quantise_cuda(inputs_MK: torch.Tensor, threshold: float = 0.0) -> Quantised:
    """A single kernel."""
    scales_M = inputs_MK.new_empty(inputs_MK.numel() // inputs_MK.shape[-1], dtype=torch.float32)
    out_MK = inputs_MK.new_empty(inputs_MK.shape, dtype=torch.int8)
    return out_MK, scales_M, _no_outliers(inputs_MK, threshold)


def _quantise_cpu(inputs_MK: torch.Tensor, threshold: float = 0.0) -> Quantised:
    """Elementwise operations; the CPU casts a whole copy first."""
    outliers = _no_outliers(inputs_MK, threshold)
    scales_M = torch.max(inputs_MK.abs(), dim=1).values.float()
    out_MK = torch.round(inputs_MK.float() * (LARGEST / scales_M.unsqueeze(-1))).to(torch.int8)
    return out_MK, scales_M, outliers


def _mixed_product(
    inputs: torch.Tensor,
    A_MK: torch.Tensor,
    B_NK: torch.Tensor,
    scales_M: torch.Tensor,
    scales_N: torch.Tensor,
    outliers: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All columns are multiplied in 8 bits."""
    product = bnb.int8_scaled_mm.default(A_MK, B_NK, scales_M, scales_N, bias=bias, dtype=inputs.dtype)
    return product, inputs.new_empty(0)


def _product(
    A_MK: torch.Tensor,
    B_NK: torch.Tensor,
    scales_M: torch.Tensor,
    scales_N: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Sums in int32, then scaled."""
    sums_MN = bnb.int8_linear_matmul.default(A_MK, B_NK)
    return bnb.int8_mm_dequant.default(sums_MN, scales_M, scales_N, dtype=dtype or torch.float16, bias=bias)


def _dequantise_cuda(
    sums_MN: torch.Tensor,
    scales_M: torch.Tensor,
    scales_N: torch.Tensor,
    dtype: torch.dtype | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """fp16 first, then the requested type."""
    out_MN = torch.empty_like(sums_MN, dtype=torch.float16)
    if bias is not None and bias.dtype != torch.float16:
        out_MN.add_(bias)
    return out_MN.to(dtype or torch.float16)


def _dequantise_cpu(
    sums_MN: torch.Tensor,
    scales_M: torch.Tensor,
    scales_N: torch.Tensor,
    dtype: torch.dtype | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """In fp32, on a cast copy."""
    scales_MN = scales_M.reshape(-1, 1) * scales_N.reshape(1, -1)
    out_MN = sums_MN.view(-1, sums_MN.shape[-1]).float() * scales_MN
    del scales_MN
    out_MN = out_MN * PER_PRODUCT
    if bias is not None:
        out_MN += bias
    return out_MN.to(dtype or torch.float16)
