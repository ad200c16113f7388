"""AdamW with 8-bit moments in one pass, as a Triton kernel: bitsandbytes' rule, state and code books.

Dettmers et al. 2021, arXiv 2110.02861: a moment is a level of a code book, times an fp32 scale for each block of 256
values. A code book has 0, 1 and seven decades; decade i has p = FIRST · 2^i levels, in the middles of p equal parts of
10^(i-7)..10^(i-6) (bitsandbytes' create_dynamic_map). FIRST is 1 for signed moments, which have the negative levels
too, and 2 for others. The values of the levels, by their number from 0 on, lie on a convex line of straight pieces. So
the largest of its pieces is a level's value, and the smallest of the inverse pieces the number of a value, without a
table to search. Without tables, Triton keeps each block in the registers of one warp: no warp waits for another.
"""

import triton
import triton.language as tl

BLOCK = 256
"""Values of a block."""
WARPS = 4
"""Warps of a program, each with a block."""
INTEGER = tl.constexpr(2.0**23)
"""fp32 numbers from here on have an integer in their lowest bits; conversions take four times as long as additions."""
INTEGER_BITS = tl.constexpr(0x4B000000)
SIGN = tl.constexpr(-0x80000000)


@triton.jit
def level_value(number, FIRST: tl.constexpr):
    """The values of levels by their numbers, fp32: the largest of the decades' lines, between 0 and 1."""
    value = tl.zeros(number.shape, tl.float32)
    for i in tl.static_range(7):
        slope = 0.9 * 10.0 ** (i - 6) / (FIRST * 2**i)
        start = 10.0 ** (i - 6) * (0.1 + 0.9 * (FIRST - 0.5) / (FIRST * 2**i) - 0.9)
        value = tl.maximum(value, number * slope + start)
    return tl.minimum(value, 1.0)


@triton.jit
def level_number(x, FIRST: tl.constexpr):
    """Numbers of levels by values of [0, 1], to be rounded to the nearest integer."""
    number = x * (1e6 / (0.1 + 0.45 / FIRST))  # Between 0 and the first level.
    for i in tl.static_range(7):
        levels = FIRST * 2.0**i
        slope = levels * 10.0 ** (6 - i) / 0.9
        number = tl.minimum(number, x * slope + (levels * 8.0 / 9.0 + 0.5 - FIRST))
        if i < 6:  # Between this decade's last level and the first of the next.
            number = tl.minimum(number, x * (slope / 3.0) + (levels * (2.0 - 1.0 / 2.7) + 1.0 / 6.0 - FIRST))
    return tl.maximum(number, (x - 1.0) * (FIRST * 64 / 0.45) + (FIRST * 127 + 1))  # Between the last level and 1.


@triton.jit
def as_float(code):
    """Bytes, given as int32, as fp32."""
    return (code | INTEGER_BITS).to(tl.float32, bitcast=True) - INTEGER


@triton.jit
def as_code(number):
    """fp32 numbers of 0..255, rounded to the nearest byte."""
    return (number + INTEGER).to(tl.int32, bitcast=True).to(tl.uint8)


@triton.jit
def with_sign(magnitude, signed):
    """Positive numbers with the signs of others."""
    bits = magnitude.to(tl.int32, bitcast=True) | (signed.to(tl.int32, bitcast=True) & SIGN)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def adamw_8bit_kernel(
    parameter_ptr,
    gradient_ptr,
    codes1_ptr,
    codes2_ptr,
    scales1_ptr,
    scales2_ptr,
    values,
    decay,
    step_size,
    epsilon,
    beta1,
    beta2,
    rest1,
    rest2,
    BLOCK: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Update a block in each warp.

    decay: 1 - lr · weight decay; step_size: lr · sqrt(1 - beta2^t) / (1 - beta1^t); epsilon: eps · sqrt(1 - beta2^t);
    rest1, rest2: 1 - beta, which fp32 would round in its fifth digit.
    As in bitsandbytes' kernel, a value whose gradient is not finite stays, and its moments become 0.
    """
    first = tl.program_id(0).to(tl.int64) * WARPS
    left = tl.minimum(values - first * BLOCK, WARPS * BLOCK).to(tl.int32)
    parameter_ptr += first * BLOCK
    gradient_ptr += first * BLOCK
    codes1_ptr += first * BLOCK
    codes2_ptr += first * BLOCK
    scales1_ptr += first
    scales2_ptr += first
    row = tl.arange(0, WARPS)
    place = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside, row_inside = place < left, row * BLOCK < left

    gradient = tl.load(gradient_ptr + place, mask=inside, other=0.0).to(tl.float32)
    before = tl.load(parameter_ptr + place, mask=inside, other=0.0).to(tl.float32)
    code1 = tl.load(codes1_ptr + place, mask=inside, other=127).to(tl.int32)
    code2 = tl.load(codes2_ptr + place, mask=inside, other=0).to(tl.int32)
    scale1 = tl.load(scales1_ptr + row, mask=row_inside, other=0.0)[:, None]
    scale2 = tl.load(scales2_ptr + row, mask=row_inside, other=0.0)[:, None]

    finite = tl.abs(gradient) < float("inf")
    gradient = tl.where(finite, gradient, 0.0)
    number1 = as_float(code1) - 127.0  # Of a signed code; below 0 for negative levels.
    mean = with_sign(level_value(tl.abs(number1), 1), number1) * (scale1 * beta1) + rest1 * gradient
    square = level_value(as_float(code2), 2) * (scale2 * beta2) + rest2 * gradient * gradient
    mean, square = tl.where(finite, mean, 0.0), tl.where(finite, square, 0.0)

    after = before * decay - step_size * (mean / (tl.sqrt(square) + epsilon))
    after = tl.where(finite, after, before)
    tl.store(parameter_ptr + place, after.to(parameter_ptr.dtype.element_ty), mask=inside)

    scale1, scale2 = tl.max(tl.abs(mean), axis=1), tl.max(square, axis=1)
    tl.store(scales1_ptr + row, scale1, mask=row_inside)
    tl.store(scales2_ptr + row, scale2, mask=row_inside)
    # Not 1 / 0 for a block of zeros.
    number1 = level_number(tl.abs(mean) * (1.0 / tl.maximum(scale1, 1e-37))[:, None], 1)
    number2 = level_number(square * (1.0 / tl.maximum(scale2, 1e-37))[:, None], 2)
    # There is no -1, and a negative value stays negative, as in bitsandbytes' kernel.
    number1 = tl.where(mean < 0.0, tl.minimum(tl.maximum(number1, 1.0), 127.0), number1)
    tl.store(codes1_ptr + place, as_code(with_sign(number1, mean) + 127.0), mask=inside)
    tl.store(codes2_ptr + place, as_code(number2), mask=inside)
