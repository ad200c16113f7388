"""The segments in which PyTorch reserves a GPU's memory: of fixed sizes, or such that grow (train.expandable_segments).

Isolated here: PyTorch reads its environment when it is imported, before any parameter is known, and what changes the
setting afterwards is not among its documented functions.
"""

import os
import re

import torch

ANOTHER_ALLOCATOR = "backend:cudaMallocAsync"
"""CUDA's own allocator in place of PyTorch's: it has no segments."""


NOT_PREDICTED = (
    "max_split_size_mb",
    "roundup_power2_divisions",
    "roundup_bypass_threshold_mb",
    "garbage_collection_threshold",
)
"""Settings of PyTorch's allocator that change what is reserved and that no replay knows."""
VARIABLE = "PYTORCH_ALLOC_CONF (or PYTORCH_CUDA_ALLOC_CONF)"


def segments_from_environment() -> bool | None:
    """What the environment says of expandable segments; None where it says nothing."""
    found = re.search(r"expandable_segments\s*:\s*(True|False)", _settings())
    return None if found is None else found[1] == "True"


def environment_notes(expandable: bool) -> list[str]:
    """What the user should know, a line each, where the environment changes what a GPU reserves.

    Args:
        expandable: train.expandable_segments.
    """
    asked = _settings()
    if ANOTHER_ALLOCATOR in asked.replace(" ", ""):
        return [f"{VARIABLE}: {ANOTHER_ALLOCATOR} is not PyTorch's allocator: what it reserves is not predicted"]
    notes, segments = [], segments_from_environment()
    if segments is not None and segments != expandable:
        notes.append(
            f"train.expandable_segments: is {str(expandable).lower()}, but {VARIABLE} says {str(segments).lower()}, "
            "which PyTorch follows; reserved memory is predicted for that"
        )
    if unknown := [name for name in NOT_PREDICTED if re.search(rf"\b{name}\s*:", asked)]:
        notes.append(f"{VARIABLE}: {', '.join(unknown)} changes what is reserved, which is predicted without it")
    return notes


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
    kept = segments_from_environment()
    if kept is None:
        torch._C._accelerator_setAllocatorSettings(",".join(filter(None, (asked, f"expandable_segments:{expandable}"))))
        return None
    return None if kept == expandable else _contradiction(expandable, asked, f"{str(kept).lower()} is kept")


def _settings() -> str:
    """Settings of PyTorch's allocator; torch 2.11 does not give them back, so there what the environment says."""
    if hasattr(torch._C, "_accelerator_getAllocatorSettings"):
        return str(torch._C._accelerator_getAllocatorSettings())
    return os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))


def _contradiction(expandable: bool, asked: str, kept: str) -> str:
    """One line for an environment that has its own mind."""
    return (
        f"train.expandable_segments: is {str(expandable).lower()}, but {VARIABLE} says {asked}: {kept}; what is "
        "reserved is predicted for that only where stage estimate saw the same environment"
    )
