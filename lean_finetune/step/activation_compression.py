"""Store floating-point values in 8 bits with an fp32 scale per block (train.compress_activations).

n values have n codes and ⌈n / 128⌉ scales. A block's largest absolute value maps to the largest code: absmax
quantisation by blocks (Dettmers et al. 2022, arXiv 2110.02861, section 2.1). The functions are operations, so that a
trace sees one call instead of several for each chunk.
"""

from collections.abc import Iterator

import torch

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
