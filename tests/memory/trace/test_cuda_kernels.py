"""Memory inside CUDA and CPU kernels, against closed forms worked out by hand."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface

from lean_finetune.memory.advice.plan_memory import replay
from lean_finetune.memory.predict.deep_events import events_of
from lean_finetune.memory.trace import cuda_kernels, cuda_ops
from lean_finetune.memory.trace.cuda_kernels import (
    CUBLAS_WORKSPACE_BYTES,
    CUBLAS_WORKSPACE_BYTES_HOPPER,
    cuda_attention,
)
from lean_finetune.memory.trace.cuda_ops import reduction_bytes, workspace_bytes
from lean_finetune.memory.trace.memory_trace import WEIGHTS, MemoryTrace
from lean_finetune.model.attention.kernels import ATTENTION, VARLEN_READY, PackedRows
from lean_finetune.step.batches import BatchShape
from tests.memory.common import CPU_TARGET, gpu_target


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


QUERY, KEY = meta(3, 8, 100, 64), meta(3, 2, 100, 64)
ROWS_Q, ROWS_K, OFFSETS = meta(500, 8, 64), meta(500, 2, 64), meta(11, dtype=torch.int32)
SUMS = meta(8, 500, dtype=torch.float32)
PACKED, SCALES = meta(512 * 256 // 2, 1, dtype=torch.uint8), meta(512 * 256 // 64, dtype=torch.uint8)
TILES, ROW_TILES = 3 * 8 * 128 * (64 + 1) * 4, 8 * (500 + 10 * 128) * (64 + 1) * 4
"""Accumulators of whole tiles of tokens: rows are rounded up, and each of 10 packed rows has one more."""
WIDE = meta(3, 8, 100, 192)
RECORDED_CUDNN = [
    ((4, 32, 1024, 128), (4, 8, 1024, 128), 263169),
    ((3, 32, 1000, 128), (3, 8, 1000, 128), 192751),
    ((13, 32, 312, 128), (13, 8, 312, 128), 260599),
    ((1, 32, 96, 128), (1, 8, 96, 128), 6169),
    ((1, 12, 2048, 128), (1, 2, 2048, 128), 49345),
]
"""Shapes of queries and of keys, and the blocks of 512 bytes that an H100 allocated in backward."""
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
    # The embedding's backward sorts many tokens.
    (cuda_ops.embedding_backward_bytes, (meta(3072, 64), meta(3072, dtype=torch.int64), 100, -1, False), ()),
    (  # As recorded, in a Llama-3.2-3B.
        cuda_ops.embedding_backward_bytes,
        (meta(4096, 3072), meta(4096, dtype=torch.int64), 128256, -1, False),
        (*[32768] * 3, 8, *[32768] * 2, 36040, 55357440),
    ),
    # cuDNN's attention, as recorded; wider heads take flash attention.
    *[
        (cuda_kernels.cudnn_backward_bytes, (meta(*q), meta(*q), meta(*k)), 512 * blocks - 511)
        for q, k, blocks in RECORDED_CUDNN
    ],
    (cuda_kernels.cudnn_backward_bytes, (WIDE, WIDE, WIDE), 3 * 8 * 128 * (192 + 1) * 4),
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


@pytest.mark.parametrize(
    ("tokens", "vocabulary", "expected"),
    [(27, 151936, (4 * 27 * 19, 4 * 27)), (26, 151936, (4 * 26 * 19, 4 * 26)), (32, 128256, ()), (4096, 4096, ())],
)
def test_the_largest_logit_of_few_tokens_has_the_recorded_buffers(tokens, vocabulary, expected):
    """A step of Qwen predicted 1.5 KiB below an H100's; Llama's vocabulary is small enough for one block."""
    assert reduction_bytes(meta(tokens, vocabulary), [1], gpu_threads=H100_THREADS) == expected


@pytest.mark.parametrize(("tokens", "unpacks"), [(128, True), (4, False)])
@pytest.mark.parametrize("double", [True, False])
def test_a_packed_weight_is_unpacked_before_the_product(tokens, unpacks, double):
    """The product allocated first, or the fp32 scales left out: bitsandbytes passes them by position."""
    trace = MemoryTrace(granularity_bytes=1, rules=gpu_target("H100").rules, vocab_size=-1)
    with FakeTensorMode():
        inputs = torch.empty(1, tokens, 256, dtype=torch.bfloat16)
        packed = torch.empty(512 * 128, 1, dtype=torch.uint8)
        scales, nested = torch.empty(2048, dtype=torch.uint8), torch.empty(8)
        of_scales = [torch.empty(256), torch.empty(())] if double else []
        rest = [None, scales, *of_scales] if double else []
        trace.register([inputs, packed, scales, nested, *of_scales], WEIGHTS)
        start = trace.event_count
        with trace.recording(), trace.phase("forward"):
            out = torch.ops.bitsandbytes.gemm_4bit(inputs, packed, [512, 256], nested, 64, "nf4", *rest)
        assert out.shape == (1, tokens, 512)
    inside = [2048 * 4] * 2 * double + [512 * 256 * 2] if unpacks else []
    assert [size for _, size in trace.events_from(start)] == [*inside, tokens * 512 * 2, *(-size for size in inside)]


def test_partial_norms_exist_before_the_norms():
    """One partial norm per tensor and block of 65,536 values."""
    trace = MemoryTrace(granularity_bytes=1, rules=gpu_target("H100").rules, vocab_size=-1)
    with FakeTensorMode():
        tensors = [torch.empty(65536 * 3 + 1), torch.empty(10)]
        trace.register(tensors, WEIGHTS)
        start = trace.event_count
        with trace.recording(), trace.phase("clip"):
            norms = torch._foreach_norm(tensors, 2)
        assert [norm.shape for norm in norms] == [(), ()]
        assert [size for _, size in trace.events_from(start)] == [2 * 4 * 4, 4, 4, -2 * 4 * 4]


def test_a_thread_has_a_workspace_from_its_first_product_on():
    """The workspaces before the first layer's tensors: 20 to 40 MiB of reserved memory too much or too little."""
    target = gpu_target("H100")
    trace = MemoryTrace(granularity_bytes=512, rules=target.rules, vocab_size=-1)
    with FakeTensorMode():
        layer = torch.nn.Linear(256, 512, dtype=torch.bfloat16)
        inputs = torch.empty(128, 256, dtype=torch.bfloat16, requires_grad=True)
        trace.register([inputs, *layer.parameters()], WEIGHTS)
        trace.register_matmul_workspaces(target.constant_bytes, target.bias_workspace_bytes)
        with trace.recording():
            trace.begin_micro_batch(BatchShape(rows=1, length=128, supervised=1, packed_lengths=None))
            with trace.phase("forward"):
                out = layer(inputs)
            with trace.phase("backward"):
                out.sum().backward()
    events, half, bias = events_of(trace), target.constant_bytes // 2, target.bias_workspace_bytes
    (forward, forward_end, _), (backward, backward_end, _) = events.phases
    assert events.size_E[forward:forward_end].tolist() == [out.nbytes, bias]
    (first, after_result), (second, in_backward) = events.workspaces
    assert events.size_E[[first, second]].tolist() == [half, half]
    assert after_result == forward + 1 and backward < in_backward < backward_end
    # Tensors count them from the start, as every later step does; the allocator gets them when they are used.
    assert trace.peaks()["forward"].bytes == sum(t.nbytes for t in (inputs, *layer.parameters(), out)) + 2 * half + bias
    steps = ((BatchShape(rows=1, length=128, supervised=1, packed_lengths=None),),)
    reserved = replay(events, steps, expandable=False, capacity_bytes=None).reserved_by_phase
    assert reserved["backward"] - reserved["forward"] == half


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
