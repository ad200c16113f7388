"""Which exceptions say that memory has ended."""

import errno

import torch

SAYINGS = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
)
"""Of exceptions without a type of their own: PyTorch's CPU allocator, and libraries beside CUDA's allocator."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory has ended, on the device or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(saying in str(error) for saying in SAYINGS)
