"""The segments in which PyTorch reserves a GPU's memory: of fixed sizes, or such that grow (train.expandable_segments).

Isolated here: PyTorch reads its environment when it is imported, before any parameter is known, and what changes the
setting afterwards is not among its documented functions.
"""

import os
import re

import torch

ANOTHER_ALLOCATOR = "backend:cudaMallocAsync"
"""CUDA's own allocator in place of PyTorch's: it has no segments."""


def use_segments(expandable: bool, device: torch.device) -> str | None:
    """Choose the segments; call before the first tensor is on the device. On a CPU there are none.

    What PYTORCH_ALLOC_CONF says (or, where that is not set, PYTORCH_CUDA_ALLOC_CONF) is kept.

    Returns:
        What the user should know where the environment says something else than `expandable`; else None.
    """
    if device.type != "cuda":
        return None
    asked = _settings()
    if ANOTHER_ALLOCATOR in asked.replace(" ", ""):
        return _contradiction(expandable, asked, "PyTorch's allocator is not in use")
    found = re.search(r"expandable_segments\s*:\s*(True|False)", asked)
    if found is None:
        torch._C._accelerator_setAllocatorSettings(",".join(filter(None, (asked, f"expandable_segments:{expandable}"))))
        return None
    kept = found[1] == "True"
    return None if kept == expandable else _contradiction(expandable, asked, f"{str(kept).lower()} is kept")


def _settings() -> str:
    """Settings of PyTorch's allocator; torch 2.11 does not give them back, so there what the environment says."""
    if hasattr(torch._C, "_accelerator_getAllocatorSettings"):
        return str(torch._C._accelerator_getAllocatorSettings())
    return os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))


def _contradiction(expandable: bool, asked: str, kept: str) -> str:
    """One line for an environment that has its own mind."""
    return (
        f"train.expandable_segments: is {str(expandable).lower()}, but the environment's PYTORCH_ALLOC_CONF (or "
        f"PYTORCH_CUDA_ALLOC_CONF) says {asked}: {kept}, and what was predicted to be reserved is for another setting"
    )
