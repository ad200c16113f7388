"""Memory behaviour of the target device that fake CPU tensors do not show: kernels, workspaces, block sizes."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from cuda_memory.gpus import Device
from lean_finetune.config.field_types import FusedKernels
from lean_finetune.core.optional_bitsandbytes import operations
from lean_finetune.memory.trace.cpu_kernels import PROJECT_WORKSPACES, cpu_rules
from lean_finetune.memory.trace.cuda_ops import (
    efficient_attention,
    efficient_backward,
    embedding_backward_bytes,
    index_put_bytes,
    int8_expansions,
    int8_training_as_on_cuda,
    reduction_workspaces,
)
from lean_finetune.memory.trace.memory_trace import OpRules, Workspace
from lean_finetune.model.attention.kernels import (
    FLASH_HEAD_SIZE_MULTIPLE,
    Kernel,
    attention_kernel,
    no_packed_rows,
    takes_flash,
)
from lean_finetune.model.norms import fused_norms
from lean_finetune.patches.of_models import PACKED_SEARCH
from lean_finetune.patches.of_traces import DROPOUT_AND_SOFTMAX, LAUNCHES, NORM_GRADIENT, SHARED_MEMORY_CHECK
from lean_finetune.patches.patch import replaced
from lean_finetune.plan.batch_plan import ATTENTION_TILE_TOKENS

TUNING_BYTES = 256 * 2**20
"""Triton's buffer while it times the configurations of a kernel (triton/backends/nvidia/driver.py)."""
SHARED_MEMORY = {
    **{(7, 0): 98_304, (7, 5): 65_536, (8, 0): 166_912, (8, 6): 101_376, (8, 7): 166_912, (8, 9): 101_376},
    **{(9, 0): 232_448, (10, 0): 232_448, (10, 3): 232_448, (12, 0): 101_376, (12, 1): 101_376},
}
"""Bytes of shared memory that a block can have, by compute capability (CUDA C++ Programming Guide, table 30)."""


@contextmanager
def without_launches(
    choice: FusedKernels, multiprocessors: int, capability: tuple[int, int] | None = None
) -> Iterator[None]:
    """A context in which Triton launches no kernels, and fused kernels allocate as on a GPU.

    Args:
        choice: train.fused_kernels.
        multiprocessors: of the GPU.
        capability: its compute capability; None for a CPU, where Triton tunes nothing.
    """
    if choice in ("none", "auto"):
        yield
        return
    allocations = _liger_on(multiprocessors) if choice == "liger" else _fla_on(capability)
    tunes = choice == "fla" and capability is not None

    def launch(kernel: Any, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: _tune(kernel) if tunes else None

    with LAUNCHES.during(launch), allocations:
        yield


def _tune(kernel: Any) -> None:
    """Allocate Triton's buffer, and free it, if a kernel has several configurations.

    It exists at the first launch of a kernel for its sizes. A plan's first micro-batch is its largest, so that most
    kernels are tuned where memory is highest.
    """
    if len(getattr(kernel, "configs", ())) > 1:
        torch.empty(TUNING_BYTES, dtype=torch.uint8)
    elif (inner := getattr(kernel, "fn", None)) is not None:
        _tune(inner)


@contextmanager
def _fla_on(capability: tuple[int, int] | None) -> Iterator[None]:
    """flash-linear-attention's partial sums of the decay's gradient: one for each tile that fits shared memory."""
    from fla.utils.hardware import Backend

    shared = 0 if capability is None else SHARED_MEMORY.get(capability, 0)
    fits = lambda arch="none", index=0: shared >= Backend.get_shared_memory(arch)  # noqa: E731
    with SHARED_MEMORY_CHECK.during(fits), warnings.catch_warnings():
        # Its backward asks for the autocast of GPUs, which a machine without one lacks; no operation there needs it.
        warnings.filterwarnings("ignore", "CUDA is not available", UserWarning)
        yield


@contextmanager
def _liger_on(multiprocessors: int) -> Iterator[None]:
    """Liger-Kernel's partial sums of a norm's gradient: one for each multiprocessor."""
    (backward,) = NORM_GRADIENT.originals()

    def backward_on_gpu(*args: Any, **kwargs: Any) -> Any:
        with _RowPerMultiprocessor(multiprocessors):
            return backward(*args, **kwargs)

    with NORM_GRADIENT.during(backward_on_gpu):
        yield


class _RowPerMultiprocessor(TorchFunctionMode):
    """Allocates the partial sums of a norm's weight gradient as on a GPU; without one, Liger allocates a single row."""

    def __init__(self, rows: int):
        super().__init__()
        self._rows = rows

    def __torch_function__(
        self, function: Callable, types: Any, args: Sequence = (), kwargs: Mapping | None = None
    ) -> Any:
        """Call a function of PyTorch."""
        if function is torch.empty:
            args = ((self._rows, *args[0][1:]), *args[1:])
        return function(*args, **(kwargs or {}))


# CUDA.
#
# Shape legend: B rows, H query heads, G key/value heads, T tokens, D head size; a linear weight is N × K.
# Sources: PyTorch's aten/src/ATen/native/transformers/cuda and native/cuda, bitsandbytes' backends/cuda/ops.py.

aten = torch.ops.aten
FP32 = torch.float32


CUDA_BLOCK_BYTES = 512
"""The caching allocator rounds every request up to a multiple of this (kMinBlockSize)."""
CUBLAS_HANDLES = 2
"""One for the forward thread, one for autograd's backward thread; each has a workspace."""
CUBLAS_WORKSPACE_BYTES = 4096 * 2 * 1024 + 16 * 8 * 1024
"""cuBLAS workspace below compute capability 9 (PyTorch's default, :4096:2:16:8)."""
CUBLAS_WORKSPACE_BYTES_HOPPER = 4096 * 8 * 1024
"""cuBLAS workspace from compute capability 9 on (PyTorch's default, :4096:8)."""

CUBLASLT_WORKSPACE_BYTES = 1024 * 1024
"""cuBLASLt workspace of each thread that adds a bias to a product (PyTorch's default; measured on an H100)."""

FLASH_ACCUMULATOR_HEAD_MULTIPLE = 32
CUDNN_GENERATIONS, CUDNN_MAX_HEAD_SIZE = (9, 10), 128
"""First numbers of the compute capabilities whose attention PyTorch gives to cuDNN, and up to which head size."""
CUDNN_REST_BYTES = 1
"""The rest of cuDNN's buffer, which begins a further block of the allocator."""
MULTI_TENSOR_CHUNK = 65536
"""Elements of one block of the multi-tensor kernels (kChunkSize)."""
FUSED_GEMM_MAX_ROWS = 4
"""Up to this many tokens bitsandbytes multiplies by the 4-bit weight; above, it may dequantise the weight first."""


def _no_bias(*args: Any, **kwargs: Any) -> bool:
    return False


PRODUCTS: dict[Any, Callable[..., bool]] = {
    **dict.fromkeys((aten.mm.default, aten.mm.out, aten.bmm.default, aten.baddbmm.default), _no_bias),
    **dict.fromkeys((aten.addmm_.default, aten.addmm.out), _no_bias),
    aten.addmm.default: lambda bias, *rest, **kwargs: bias.ndim == 1,
    **dict.fromkeys(operations("gemm_4bit"), lambda *args, **kwargs: len(args) > 6 and args[6] is not None),
}
"""Products by cuBLAS, and whether they add a bias."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """How the target device differs from the fake CPU tensors that represent it."""

    granularity_bytes: int
    """The allocator rounds requests up to a multiple of this; 1 on the CPU, where requested bytes are counted."""
    rules: OpRules
    constant_bytes: int
    """cuBLAS' workspaces, in use from the first step to the last."""
    bias_workspace_bytes: int
    """Workspace of each thread that adds a bias to a product."""
    foreach: bool
    """Whether PyTorch uses multi-tensor kernels."""
    capability: tuple[int, int] | None
    """Compute capability of a GPU; None for a CPU."""
    multiprocessors: int = 1

    @property
    def device(self) -> tuple[Any, ...]:
        """Equal for devices of which all else is equal."""
        return self.granularity_bytes, self.constant_bytes, self.foreach, self.capability, self.multiprocessors

    @contextmanager
    def attention(self) -> Iterator[None]:
        """Run attention, dropout and 8-bit matmuls as the device does, with training's masks.

        transformers detects packed sequences by the values of the positions, which fake tensors lack. Without this
        patch it would give models with a sliding window one mask per row instead of one for all. Packed rows get no
        mask in either case.
        """
        on_device = nullcontext() if self.capability is None else _attention_on(self.capability)
        with PACKED_SEARCH.during(no_packed_rows), on_device:
            yield


def target_of(device: Device) -> Target:
    """The rules of a device."""
    if device.kind == "cpu":
        return Target(
            granularity_bytes=1,
            rules=cpu_rules(),
            constant_bytes=0,
            bias_workspace_bytes=0,
            foreach=False,
            capability=None,
        )
    hopper = device.compute_capability >= (9, 0)
    workspace = CUBLAS_WORKSPACE_BYTES_HOPPER if hopper else CUBLAS_WORKSPACE_BYTES
    return Target(
        granularity_bytes=CUDA_BLOCK_BYTES,
        rules=OpRules(
            expansions=_cuda_expansions(device),
            workspaces=_cuda_workspaces(device),
            workspaces_first={
                aten._foreach_norm.Scalar: foreach_norm_bytes,
                **dict.fromkeys(operations("gemm_4bit"), gemm_4bit_bytes),
            },
            products=PRODUCTS,
        ),
        constant_bytes=CUBLAS_HANDLES * workspace,
        bias_workspace_bytes=CUBLASLT_WORKSPACE_BYTES,
        foreach=True,
        capability=device.compute_capability,
        multiprocessors=device.multiprocessors,
    )


@contextmanager
def _attention_on(capability: tuple[int, int]) -> Iterator[None]:
    """Attention, dropout, norms and 8-bit matmuls as CUDA runs them at this compute capability."""
    with (
        attention_kernel(cuda_attention(capability), capability),
        _fused_functions(),
        _fused_norms(),
        int8_training_as_on_cuda(),
    ):
        yield


@contextmanager
def _fused_norms() -> Iterator[None]:
    """RMSNorm as PyTorch's kernel allocates (native/cuda/layer_norm_kernel.cu, `_fused_rms_norm_cuda`)."""

    def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.contiguous()
        normed = torch.empty_like(x)
        return normed, torch.empty((*x.shape[:-1], 1), dtype=FP32)

    def norm_backward(grad: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x, of_input = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        grad.contiguous()
        return of_input

    with (
        replaced(fused_norms, "on_gpu", lambda x: True),
        replaced(fused_norms, "norm", norm),
        replaced(fused_norms, "norm_backward", norm_backward),
    ):
        yield


def _cuda_expansions(device: Device) -> dict[Any, Callable[..., Any]]:
    """CUDA kernels that allocate other tensors than their fake versions."""
    return {
        aten._scaled_dot_product_efficient_attention_backward.default: efficient_backward(device.compute_capability),
        aten.native_dropout.default: dropout_on_cuda,
        **int8_expansions(cuda=True),
    }


def dropout_on_cuda(x: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The mask, one byte a value, before the result (native_dropout_cuda)."""
    mask = torch.empty_like(x, dtype=torch.bool)
    return torch.empty_like(x), mask


@contextmanager
def _fused_functions() -> Iterator[None]:
    """Dropout as one kernel that saves one byte a value; on a CPU it saves the mask in the type of the values.

    Softmax of fp16 in fp32 converts inside its kernel (native/SoftMax.cpp); other types are converted before.
    """
    unfused_dropout, unfused_softmax = F.dropout, F.softmax

    def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        if inplace or not training or not 0.0 < p < 1.0:
            return unfused_dropout(input, p, training, inplace)
        return torch.native_dropout(input, p, True)[0]

    def softmax(input: torch.Tensor, dim: int | None = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        if input.dtype == torch.float16 and kwargs.get("dtype") == torch.float32 and dim is not None:
            return torch._softmax(input, dim, True)
        return unfused_softmax(input, dim, *args, **kwargs)

    with DROPOUT_AND_SOFTMAX.during(dropout, softmax):
        yield


def _cuda_workspaces(device: Device) -> dict[Any, Workspace]:
    """Temporary bytes of CUDA kernels, by operation."""
    workspaces: dict[Any, Workspace] = {
        **reduction_workspaces(device.compute_capability, device.multiprocessors),
        aten._scaled_dot_product_flash_attention_backward.default: (
            cudnn_backward_bytes if device.compute_capability[0] in CUDNN_GENERATIONS else flash_backward_bytes
        ),
        torch.ops.torch_attn._varlen_attn_backward.default: varlen_backward_bytes,
        aten._softmax_backward_data.default: softmax_backward_bytes,
        aten.embedding_dense_backward.default: embedding_backward_bytes,
        aten.index_put.default: index_put_bytes,
        aten.index_put_.default: index_put_bytes,
        **PROJECT_WORKSPACES,
    }
    return workspaces


def flash_backward_bytes(grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *rest: Any, **kwargs: Any) -> int:
    """fp32 accumulators of dQ and of the softmax sums; dK and dV per query head if heads are grouped (mha_bwd)."""
    B, H, T, D = query.shape
    tiled_tokens = -(-T // ATTENTION_TILE_TOKENS) * ATTENTION_TILE_TOKENS
    grouped = 2 * B * H * key.shape[2] * D * key.element_size() if key.shape[1] != H else 0
    return B * _flash_accumulator_bytes(H, tiled_tokens, D) + grouped


def cudnn_backward_bytes(grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *rest: Any, **kwargs: Any) -> int:
    """As `flash_backward_bytes` without rounding to tiles of tokens, and less than a block of the allocator more.

    PyTorch prefers cuDNN's kernel on these GPUs. An H100 allocated so much for rows of 96 to 2,048 tokens.
    """
    B, H, T, D = query.shape
    if D > CUDNN_MAX_HEAD_SIZE:
        return flash_backward_bytes(grad, query, key)
    grouped = 2 * B * H * key.shape[2] * D * key.element_size() if key.shape[1] != H else 0
    return B * H * T * (D + 1) * FP32.itemsize + grouped + CUDNN_REST_BYTES


def varlen_backward_bytes(
    grad: torch.Tensor,
    query_THD: torch.Tensor,
    key_THD: torch.Tensor,
    value_THD: torch.Tensor,
    out_THD: torch.Tensor,
    sums: torch.Tensor,
    offsets: torch.Tensor,
    *rest: Any,
    **kwargs: Any,
) -> int:
    """As `flash_backward_bytes`, padded by one tile of tokens per row (mha_varlen_bwd)."""
    T, H, D = query_THD.shape
    tiled_tokens = T + (offsets.shape[0] - 1) * ATTENTION_TILE_TOKENS
    grouped = 2 * T * H * D * key_THD.element_size() if key_THD.shape[1] != H else 0
    return _flash_accumulator_bytes(H, tiled_tokens, D) + grouped


def _flash_accumulator_bytes(heads: int, tokens: int, head_size: int) -> int:
    """fp32 accumulators of dQ and of the softmax sums, the head size padded."""
    padded = -(-head_size // FLASH_ACCUMULATOR_HEAD_MULTIPLE) * FLASH_ACCUMULATOR_HEAD_MULTIPLE
    return heads * tokens * (padded + 1) * 4


def gemm_4bit_bytes(
    inputs: torch.Tensor,
    packed: torch.Tensor,
    shape: Sequence[int],
    scales: torch.Tensor,
    block: int,
    quant_type: str,
    bias: torch.Tensor | None = None,
    packed_scales: torch.Tensor | None = None,
    *rest: Any,
) -> tuple[int, ...]:
    """The fp32 scales of blocks, twice (read, then shifted), and the dequantised weight (N, K).

    An upper bound: for a few hundred tokens some GPUs multiply by the 4-bit weight instead.
    """
    if inputs.numel() // inputs.shape[-1] <= FUSED_GEMM_MAX_ROWS:
        return ()
    unpacked = 0 if packed_scales is None else packed_scales.numel() * FP32.itemsize
    return unpacked, unpacked, math.prod(shape) * inputs.element_size()


def softmax_backward_bytes(grad: torch.Tensor, *rest: Any, **kwargs: Any) -> int:
    """The product of gradient and output (softmax_backward_cuda_out)."""
    return grad.numel() * grad.element_size()


def foreach_norm_bytes(tensors: Sequence[torch.Tensor], *rest: Any, **kwargs: Any) -> int:
    """One fp32 partial norm per tensor and block of the largest tensor."""
    return len(tensors) * max(-(-tensor.numel() // MULTI_TENSOR_CHUNK) for tensor in tensors) * 4


def cuda_attention(capability: tuple[int, int]) -> Kernel:
    """The attention that CUDA runs at this compute capability, for tensors on any device.

    Flash for 16-bit types from 8.0 on; otherwise, or with a mask, the memory-efficient kernel, which also works in
    fp32. From 9.0 on PyTorch may prefer cuDNN's kernel: it saves the same tensors as flash.
    """

    def attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        causal = query.shape[2] > 1 and attention_mask is None and getattr(module, "is_causal", True)
        D = query.shape[-1]
        if query.dtype == torch.float32 and torch.is_autocast_enabled("cpu"):  # Autocast converts for attention.
            dtype = torch.get_autocast_dtype("cpu")
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        if attention_mask is None and takes_flash(query, capability):
            padding = -D % FLASH_HEAD_SIZE_MULTIPLE
            if padding:
                query, key, value = (F.pad(tensor, (0, padding)) for tensor in (query, key, value))
                scaling = scaling if scaling is not None else D**-0.5
            out = aten._scaled_dot_product_flash_attention(query, key, value, dropout, causal, False, scale=scaling)[0]
            out = out[..., :D]
        else:
            out = efficient_attention(query, key, value, attention_mask, dropout, scaling, causal)
        return out.transpose(1, 2).contiguous(), None

    return attention
