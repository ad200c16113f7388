"""Triton kernels of a layer's operations that PyTorch runs in several passes: the gated activation and the rotation.

They compute in fp32 and round once. Shape legend: B rows, T tokens, H heads, D head size.
"""

import triton
import triton.language as tl

BLOCK = 1024
"""Values of a program of the gated activation, and pairs of values of a tile of the rotation."""
WARPS = 4


@triton.jit
def silu_mul_kernel(gate_ptr, up_ptr, out_ptr, values, BLOCK: tl.constexpr):
    """silu(gate) · up."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < values
    gate = tl.load(gate_ptr + place, mask=inside).to(tl.float32)
    up = tl.load(up_ptr + place, mask=inside).to(tl.float32)
    tl.store(out_ptr + place, (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def silu_mul_gradients_kernel(grad_ptr, gate_ptr, up_ptr, gate_grad_ptr, up_grad_ptr, values, BLOCK: tl.constexpr):
    """The gradients of gate and up; that of gate may have the memory of the product's."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < values
    grad = tl.load(grad_ptr + place, mask=inside).to(tl.float32)
    gate = tl.load(gate_ptr + place, mask=inside).to(tl.float32)
    up = tl.load(up_ptr + place, mask=inside).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    dtype = gate_grad_ptr.dtype.element_ty
    tl.store(gate_grad_ptr + place, (grad * up * (sigmoid + silu * (1.0 - sigmoid))).to(dtype), mask=inside)
    tl.store(up_grad_ptr + place, (grad * silu).to(dtype), mask=inside)


@triton.jit
def rotate_heads(
    x_ptr,
    out_ptr,
    stride,
    cos1,
    cos2,
    sin1,
    sin2,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    """Rotate the heads of one token; they lie `stride` apart in x, and next to each other in the result."""
    pair = tl.arange(0, WIDTH)[None, :]
    for start in tl.static_range(0, HEADS, TILE):
        head = start + tl.arange(0, TILE)[:, None]
        inside = (head < HEADS) & (pair < HALF)
        x1 = tl.load(x_ptr + head * stride + pair, mask=inside).to(tl.float32)
        x2 = tl.load(x_ptr + head * stride + pair + HALF, mask=inside).to(tl.float32)
        out = out_ptr + head * (2 * HALF) + pair
        dtype = out_ptr.dtype.element_ty
        tl.store(out, (x1 * cos1 - x2 * sin1).to(dtype), mask=inside)
        tl.store(out + HALF, (x2 * cos2 + x1 * sin2).to(dtype), mask=inside)


@triton.jit
def rotate_kernel(
    query_ptr,
    key_ptr,
    query_out_ptr,
    key_out_ptr,
    cos_ptr,
    sin_ptr,
    tokens,
    query_row_stride,
    query_token_stride,
    query_head_stride,
    key_row_stride,
    key_token_stride,
    key_head_stride,
    angle_row_stride,
    INVERSE: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    """Make x · cos + (-x2, x1) · sin of the queries and keys of one token; with INVERSE the gradients of x.

    HALF: half of the head size; WIDTH: the power of two from there on; TILE: heads at a time.
    """
    token = tl.program_id(0)
    row, place = (token // tokens).to(tl.int64), (token % tokens).to(tl.int64)
    pair = tl.arange(0, WIDTH)[None, :]
    angle = row * angle_row_stride + place * (2 * HALF) + pair
    cos1 = tl.load(cos_ptr + angle, mask=pair < HALF).to(tl.float32)
    cos2 = tl.load(cos_ptr + angle + HALF, mask=pair < HALF).to(tl.float32)
    sin1 = tl.load(sin_ptr + angle, mask=pair < HALF).to(tl.float32)
    sin2 = tl.load(sin_ptr + angle + HALF, mask=pair < HALF).to(tl.float32)
    if INVERSE:
        sin1, sin2 = -sin2, -sin1
    query_ptr += row * query_row_stride + place * query_token_stride
    query_out_ptr += token.to(tl.int64) * (QUERY_HEADS * 2 * HALF)
    rotate_heads(query_ptr, query_out_ptr, query_head_stride, cos1, cos2, sin1, sin2, QUERY_HEADS, HALF, WIDTH, TILE)
    key_ptr += row * key_row_stride + place * key_token_stride
    key_out_ptr += token.to(tl.int64) * (KEY_HEADS * 2 * HALF)
    rotate_heads(key_ptr, key_out_ptr, key_head_stride, cos1, cos2, sin1, sin2, KEY_HEADS, HALF, WIDTH, TILE)
