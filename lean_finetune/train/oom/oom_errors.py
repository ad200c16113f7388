"""Recognise out-of-memory exceptions."""

import errno

import torch

MESSAGES = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
)
"""Messages of plain RuntimeErrors: from PyTorch's CPU allocator, and from libraries that allocate themselves."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that the device or the host is out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(message in str(error) for message in MESSAGES)
