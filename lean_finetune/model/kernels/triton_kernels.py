"""Where this project's Triton kernels run."""

from functools import cache
from importlib.util import find_spec

import torch

OLDEST_GPU = (8, 0)
"""Lowest compute capability on which the kernels run: below it, GPUs do not compute in bf16."""


@cache
def has_triton_kernels(device: torch.device) -> bool:
    """Whether the kernels run on a device: a GPU of this capability, with Triton and a PyTorch for CUDA."""
    built = torch.version.cuda is not None and find_spec("triton") is not None
    return device.type == "cuda" and built and torch.cuda.get_device_capability(device) >= OLDEST_GPU
