"""What CUDA and CPU kernels hold inside, against closed forms worked out by hand."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface

from lean_finetune.memory.trace import cuda_kernels
from lean_finetune.memory.trace.cuda_kernels import (
    CUBLAS_WORKSPACE_BYTES,
    CUBLAS_WORKSPACE_BYTES_HOPPER,
    cuda_attention,
)
from lean_finetune.model.attention import ATTENTION, JoinedRows, takes_flash
from tests.memory.common import CPU_TARGET, gpu_target


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_flash_backward_rounds_to_tiles_and_spreads_grouped_heads():
    """Accumulators of short rows underestimated; dK and dV of grouped heads forgotten."""
    query, key = meta(3, 8, 100, 64), meta(3, 2, 100, 64)
    accumulators = 3 * 8 * 128 * (64 + 1) * 4
    assert cuda_kernels.flash_backward_bytes(query, query, query, query) == accumulators
    assert cuda_kernels.flash_backward_bytes(query, query, key, key) == accumulators + 2 * 3 * 8 * 100 * 64 * 2


def test_flash_backward_of_joined_rows_spares_a_tile_for_each():
    """Many short rows in one sequence need more than one long one."""
    query, key, offsets = meta(500, 8, 64), meta(500, 2, 64), meta(11, dtype=torch.int32)
    accumulators = 8 * (500 + 10 * 128) * (64 + 1) * 4
    sums = meta(8, 500, dtype=torch.float32)
    assert cuda_kernels.varlen_backward_bytes(query, query, query, query, query, sums, offsets) == accumulators
    grouped = cuda_kernels.varlen_backward_bytes(query, query, key, key, query, sums, offsets)
    assert grouped == accumulators + 2 * 500 * 8 * 64 * 2


def test_efficient_backward_accumulates_apart_only_below_fp32():
    """fp32 training charged for copies it does not make."""
    full, half = meta(1, 4, 32, 16, dtype=torch.float32), meta(1, 4, 32, 16)
    assert cuda_kernels.efficient_backward_bytes(full, full, full) == 4 * 32 * 4
    assert cuda_kernels.efficient_backward_bytes(half, half, half) == 4 * 32 * 4 + 3 * 4 * 32 * 16 * 4


def test_a_packed_weight_is_unpacked_for_many_tokens_only():
    """QLoRA's largest transient left out."""
    weight, scales = meta(512 * 256 // 2, 1, dtype=torch.uint8), meta(512 * 256 // 64, dtype=torch.uint8)
    many = cuda_kernels.gemm_4bit_bytes(meta(2, 64, 256), weight, (512, 256), absmax_8bit=scales)
    assert many == 512 * 256 * 2 + 2 * (512 * 256 // 64) * 4
    assert cuda_kernels.gemm_4bit_bytes(meta(1, 4, 256), weight, (512, 256), absmax_8bit=scales) == 0


def test_the_embeddings_backward_sorts_many_tokens():
    """Full fine-tuning with long micro-batches underestimated."""
    few, many = meta(3072, dtype=torch.int64), meta(3073, dtype=torch.int64)
    assert cuda_kernels.embedding_backward_bytes(meta(3072, 64), few, 100, -1, False) == 0
    assert cuda_kernels.embedding_backward_bytes(meta(3073, 64), many, 100, -1, False) == 3073 * (32 + 64 * 4)


def test_the_norm_of_many_tensors_keeps_one_partial_sum_per_block():
    """Clipping on a GPU counted as free."""
    tensors = [meta(65536 * 3 + 1), meta(10)]
    assert cuda_kernels.foreach_norm_bytes(tensors, 2) == 2 * 4 * 4


@pytest.mark.parametrize(
    ("name", "bytes_of_one"), [("A100-80GB", CUBLAS_WORKSPACE_BYTES), ("T4", CUBLAS_WORKSPACE_BYTES)]
)
def test_library_workspaces_follow_the_architecture(name, bytes_of_one):
    """Hopper's four times larger workspace charged to all, or to none."""
    assert gpu_target(name).constant_bytes == 2 * bytes_of_one
    assert gpu_target("H100").constant_bytes == 2 * CUBLAS_WORKSPACE_BYTES_HOPPER
    assert CPU_TARGET.constant_bytes == 0


def test_flash_is_taken_by_16_bit_types_from_ampere_on():
    """A V100 or an fp32 run traced with a kernel it does not have."""
    half, full = meta(1, 4, 32, 64), meta(1, 4, 32, 64, dtype=torch.float32)
    assert takes_flash(half, (8, 0)) and takes_flash(half, (9, 0))
    assert not takes_flash(half, (7, 5))
    assert not takes_flash(full, (9, 0))
    assert not takes_flash(meta(1, 4, 32, 320), (9, 0))


@pytest.mark.parametrize("head_size", [64, 60])
@pytest.mark.parametrize(("dtype", "capability"), [(torch.bfloat16, (8, 0)), (torch.float32, (7, 5))])
def test_cuda_attention_gives_the_shape_every_model_expects(dtype, capability, head_size):
    """Grouped heads or an odd head size that the traced kernel cannot take."""
    with FakeTensorMode():
        query = torch.empty(2, 8, 33, head_size, dtype=dtype, requires_grad=True)
        key, value = (torch.empty(2, 2, 33, head_size, dtype=dtype, requires_grad=True) for _ in range(2))
        out, _ = cuda_attention(capability)(torch.nn.Module(), query, key, value, None)
        assert out.shape == (2, 33, 8, head_size) and out.dtype == dtype
        out.sum().backward()
        assert key.grad is not None and key.grad.shape == key.shape


def test_a_mask_takes_the_efficient_kernel_with_an_additive_bias():
    """A model with a sliding window traced as if it had none."""
    with FakeTensorMode():
        query = torch.empty(2, 8, 40, 64, dtype=torch.bfloat16)
        key = torch.empty(2, 2, 40, 64, dtype=torch.bfloat16)
        mask = torch.empty(1, 1, 40, 40, dtype=torch.bool)
        out, _ = cuda_attention((9, 0))(torch.nn.Module(), query, key, key, mask)
        assert out.shape == (2, 40, 8, 64)


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
        ("A100-80GB", torch.bfloat16, ["torch_attn::_varlen_attn"]),
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
        joined = JoinedRows(
            lengths=(50, 30, 16),
            offsets=torch.empty(4, dtype=torch.int32),
            positions_BT=torch.empty(1, 96, dtype=torch.int64),
        )
        out, _ = attention(module, query, key, value, None, scaling=None, dropout=0.0, joined_rows=joined)
        assert out.shape == (1, 96, 4, head_size)
        out.sum().backward()
        assert query.grad is not None and query.grad.shape == query.shape
    assert [name for name in operations.names if "attn" in name or "attention" in name][: len(expected)] == expected
