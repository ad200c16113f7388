"""Memory inside CUDA and CPU kernels, against closed forms worked out by hand."""

from functools import partial
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface

from lean_finetune.memory.trace import cuda_kernels, cuda_ops
from lean_finetune.memory.trace.cuda_kernels import (
    CUBLAS_WORKSPACE_BYTES,
    CUBLAS_WORKSPACE_BYTES_HOPPER,
    cuda_attention,
)
from lean_finetune.memory.trace.cuda_ops import reduction_bytes, workspace_bytes
from lean_finetune.memory.trace.memory_trace import WEIGHTS, MemoryTrace
from lean_finetune.model.attention.kernels import ATTENTION, VARLEN_READY, PackedRows
from tests.memory.common import CPU_TARGET, gpu_target


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


QUERY, KEY = meta(3, 8, 100, 64), meta(3, 2, 100, 64)
ROWS_Q, ROWS_K, OFFSETS = meta(500, 8, 64), meta(500, 2, 64), meta(11, dtype=torch.int32)
SUMS = meta(8, 500, dtype=torch.float32)
PACKED, SCALES = meta(512 * 256 // 2, 1, dtype=torch.uint8), meta(512 * 256 // 64, dtype=torch.uint8)
TILES, ROW_TILES = 3 * 8 * 128 * (64 + 1) * 4, 8 * (500 + 10 * 128) * (64 + 1) * 4
"""Accumulators of whole tiles of tokens: rows are rounded up, and each of 10 packed rows has one more."""
WORKSPACES: list[tuple[Any, tuple[Any, ...], int | tuple[int, ...]]] = [
    (cuda_kernels.flash_backward_bytes, (QUERY, QUERY, QUERY, QUERY), TILES),
    # dK and dV of grouped heads are as wide as the queries.
    (cuda_kernels.flash_backward_bytes, (QUERY, QUERY, KEY, KEY), TILES + 2 * 3 * 8 * 100 * 64 * 2),
    (cuda_kernels.varlen_backward_bytes, (ROWS_Q, ROWS_Q, ROWS_Q, ROWS_Q, ROWS_Q, SUMS, OFFSETS), ROW_TILES),
    (
        cuda_kernels.varlen_backward_bytes,
        (ROWS_Q, ROWS_Q, ROWS_K, ROWS_K, ROWS_Q, SUMS, OFFSETS),
        ROW_TILES + 2 * 500 * 8 * 64 * 2,
    ),
    # A packed weight is dequantized for many tokens only.
    (
        partial(cuda_kernels.gemm_4bit_bytes, absmax_8bit=SCALES),
        (meta(2, 64, 256), PACKED, (512, 256)),
        512 * 256 * 2 + 2 * (512 * 256 // 64) * 4,
    ),
    (partial(cuda_kernels.gemm_4bit_bytes, absmax_8bit=SCALES), (meta(1, 4, 256), PACKED, (512, 256)), 0),
    # The embedding's backward sorts many tokens.
    (cuda_ops.embedding_backward_bytes, (meta(3072, 64), meta(3072, dtype=torch.int64), 100, -1, False), 0),
    (
        cuda_ops.embedding_backward_bytes,
        (meta(3073, 64), meta(3073, dtype=torch.int64), 100, -1, False),
        3073 * (32 + 64 * 4),
    ),
    # Summing rows at equal indices sorts them: 1 byte in one block, more for 4,096 rows (both as recorded).
    (
        cuda_ops.index_put_bytes,
        (meta(10000, 64), [meta(4, 128, dtype=torch.int64)], meta(4, 128, 64), True),
        (*[4096] * 5, 1),
    ),
    (
        cuda_ops.index_put_bytes,
        (meta(10000, 64), [meta(4, 1024, dtype=torch.int64)], meta(64, 4, 1024).permute(1, 2, 0), True),
        (32768, 32768, 64 * 4096 * 2, *[32768] * 3, 72191),
    ),
    (cuda_ops.index_put_bytes, (meta(10, 64), [meta(4, dtype=torch.int64)], meta(4, 64), False), ()),
    (cuda_ops.index_put_bytes, (meta(10, 64), [meta(10, dtype=torch.bool)], meta(4, 64), True), ()),
    # The backward of a softmax multiplies its gradient by its output first.
    (cuda_kernels.softmax_backward_bytes, (meta(2, 8, 100, 100), meta(2, 8, 100, 100), -1), 2 * 8 * 100 * 100 * 2),
    # One partial sum per block of 65536 values.
    (cuda_kernels.foreach_norm_bytes, ([meta(65536 * 3 + 1), meta(10)], 2), 2 * 4 * 4),
]


@pytest.mark.parametrize(("workspace", "arguments", "expected"), WORKSPACES)
def test_memory_inside_a_kernel_has_a_closed_form(workspace, arguments, expected):
    """A kernel's largest temporary memory left out, or charged where there is none."""
    assert workspace(*arguments) == expected


H100_THREADS = 132 * 2048
RECORDED_REDUCTIONS = [
    (2560, 4, (10485760, 16)),
    (10000, 4, (41156608, 16)),
    (10000, 16, (164626432, 16)),  # A maximum with its index.
]
"""Features summed for each of 512 tokens, bytes of a partial result, and the buffers that an H100 allocated."""


@pytest.mark.parametrize(("features", "partial_bytes", "expected"), RECORDED_REDUCTIONS)
def test_a_sum_over_the_slowest_dimension_has_the_recorded_buffers(features, partial_bytes, expected):
    """Buffers that can be eight times as large as the input, left out of the prediction."""
    tokens_fastest = meta(features, 512).t()
    sizes = [
        reduction_bytes(x, [-1], gpu_threads=H100_THREADS, partial_bytes=partial_bytes)
        for x in (tokens_fastest, tokens_fastest.contiguous(), tokens_fastest[:, :128])
    ]
    assert sizes == [expected, (), ()]


def test_the_gradient_of_a_norms_weight_has_the_recorded_buffer():
    """The buffer of a sum over tokens left out: 16 MiB for a result of 4 KiB, for each norm in full training."""
    assert reduction_bytes(meta(4, 512, 1024), [0, 1], gpu_threads=H100_THREADS) == (16777216, 32)


@pytest.mark.parametrize(
    ("shape", "half", "capability", "expected"),
    [
        ((1, 32, 1000, 1000, 64), False, (8, 9), 8396800),  # As recorded.
        ((1, 32, 1000, 1000, 64), True, (8, 0), 8396800),
        ((1, 4, 128, 128, 128), True, (8, 0), 4 * (128 * 128 * 4 + 16)),
        ((1, 4, 128, 128, 128), True, (7, 5), 4 * (2 * 2 * (64 * 64 * 4 + 16) + 2 * 2 * 64 * 128 * 4)),
        ((1, 4, 128, 128, 64), False, (6, 1), 0),
    ],
)
def test_accumulators_of_the_efficient_backward_follow_its_kernel(shape, half, capability, expected):
    """Accumulators of dK and dV counted where they stay in registers, or those of dQ left out in fp32."""
    assert workspace_bytes(*shape, half=half, capability=capability) == expected


@pytest.mark.parametrize(("target", "mask_bytes"), [(gpu_target("A100-80GB"), 1), (CPU_TARGET, 2)])
def test_dropout_keeps_one_byte_a_value_on_cuda(target, mask_bytes):
    """Masks as wide as the values, which only a CPU keeps."""
    trace = MemoryTrace(granularity_bytes=1, rules=target.rules, vocab_size=-1)
    with FakeTensorMode(), target.attention():
        values = torch.empty(64, 8, dtype=torch.bfloat16, requires_grad=True)
        trace.register([values], WEIGHTS)
        with trace.recording(), trace.phase("forward"):
            dropped = torch.nn.Dropout(0.1)(values)
        assert dropped.shape == values.shape
        assert trace.current_bytes == 64 * 8 * (2 + 2 + mask_bytes)


def test_library_workspaces_follow_the_architecture():
    """Hopper's four times larger workspace charged to all, or to none."""
    workspaces = [gpu_target(name).constant_bytes for name in ("T4", "A100-80GB", "H100")]
    assert workspaces == [2 * CUBLAS_WORKSPACE_BYTES] * 2 + [2 * CUBLAS_WORKSPACE_BYTES_HOPPER]
    assert CPU_TARGET.constant_bytes == 0


@pytest.mark.parametrize("head_size", [64, 60])
@pytest.mark.parametrize(("dtype", "capability"), [(torch.bfloat16, (8, 0)), (torch.float32, (7, 5))])
@pytest.mark.parametrize("masked", [False, True])
def test_cuda_attention_gives_the_shape_every_model_expects(masked, dtype, capability, head_size):
    """Grouped heads, an odd head size or a mask that the traced kernel cannot take."""
    with FakeTensorMode():
        query = torch.empty(2, 8, 33, head_size, dtype=dtype, requires_grad=True)
        key, value = (torch.empty(2, 2, 33, head_size, dtype=dtype, requires_grad=True) for _ in range(2))
        mask = torch.empty(1, 1, 33, 33, dtype=torch.bool) if masked else None
        out, _ = cuda_attention(capability)(torch.nn.Module(), query, key, value, mask)
        assert out.shape == (2, 33, 8, head_size) and out.dtype == dtype
        out.sum().backward()
        assert key.grad is not None and key.grad.shape == key.shape


def test_autocast_converts_for_attention():
    """Rotary embeddings of an fp32 model make fp32 queries; CUDA's autocast runs attention in 16 bits nevertheless."""
    with FakeTensorMode(), torch.autocast("cpu", dtype=torch.bfloat16):
        query, key = (torch.empty((1, heads, 64, 64)) for heads in (4, 2))
        value = torch.empty((1, 2, 64, 64), dtype=torch.bfloat16)
        out, _ = cuda_attention((8, 0))(torch.nn.Module(), query, key, value, None)
    assert out.dtype == torch.bfloat16


class Operations(TorchDispatchMode):
    """Names of the operations that run."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("gpu", "dtype", "expected"),
    [
        (
            "A100-80GB",
            torch.bfloat16,
            # torch 2.11 has no grouped heads there.
            ["torch_attn::_varlen_attn"] if VARLEN_READY else ["aten::_scaled_dot_product_flash_attention"] * 3,
        ),
        ("A100-80GB", torch.float32, ["aten::_scaled_dot_product_efficient_attention"] * 3),
        ("T4", torch.float16, ["aten::_scaled_dot_product_efficient_attention"] * 3),
    ],
)
@pytest.mark.parametrize("head_size", [64, 20])
def test_joined_rows_take_one_flash_kernel_or_one_kernel_a_row(gpu, dtype, expected, head_size):
    """A trace of what the device cannot run, or of attention that sees all rows."""
    attention = AttentionInterface()[ATTENTION]
    module = torch.nn.Module()
    object.__setattr__(module, "num_key_value_groups", 2)
    with FakeTensorMode(), gpu_target(gpu).attention(), Operations() as operations:
        query = torch.empty(1, 4, 96, head_size, dtype=dtype, requires_grad=True)
        key, value = (torch.empty(1, 2, 96, head_size, dtype=dtype) for _ in range(2))
        joined = PackedRows(
            lengths=(50, 30, 16),
            offsets=torch.empty(4, dtype=torch.int32),
            positions_BT=torch.empty(1, 96, dtype=torch.int64),
        )
        out, _ = attention(module, query, key, value, None, scaling=None, dropout=0.0, packed_rows=joined)
        assert out.shape == (1, 96, 4, head_size)
        out.sum().backward()
        assert query.grad is not None and query.grad.shape == query.shape
    assert [name for name in operations.names if "attn" in name or "attention" in name][: len(expected)] == expected
