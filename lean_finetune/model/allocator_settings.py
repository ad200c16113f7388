"""Set expandable segments in PyTorch's CUDA allocator (train.expandable_segments), and respect the environment.

PyTorch reads its environment variables at import, before params.yaml is known; the function that changes the setting
afterwards is private.
"""

import os
import re

import torch

ANOTHER_ALLOCATOR = "backend:cudaMallocAsync"
"""Setting that replaces PyTorch's allocator by CUDA's own, which has no segments."""


NOT_PREDICTED = (
    "max_split_size_mb",
    "roundup_power2_divisions",
    "roundup_bypass_threshold_mb",
    "garbage_collection_threshold",
)
"""Settings that change reserved memory and that the prediction ignores."""
VARIABLE = "PYTORCH_ALLOC_CONF (or PYTORCH_CUDA_ALLOC_CONF)"


def segments_from_environment() -> bool | None:
    """Whether the environment sets expandable segments; None if it does not mention them."""
    found = re.search(r"expandable_segments\s*:\s*(True|False)", _settings())
    return None if found is None else found[1] == "True"


def environment_notes(expandable: bool) -> list[str]:
    """Notes for the user, one line each, on environment settings that change reserved memory.

    Args:
        expandable: train.expandable_segments.
    """
    settings = _settings()
    if ANOTHER_ALLOCATOR in settings.replace(" ", ""):
        return [f"{VARIABLE}: {ANOTHER_ALLOCATOR} is not PyTorch's allocator: what it reserves is not predicted"]
    notes, segments = [], segments_from_environment()
    if segments is not None and segments != expandable:
        notes.append(
            f"train.expandable_segments: is {str(expandable).lower()}, but {VARIABLE} says {str(segments).lower()}, "
            "which PyTorch follows; reserved memory is predicted for that"
        )
    if unknown := [name for name in NOT_PREDICTED if re.search(rf"\b{name}\s*:", settings)]:
        notes.append(f"{VARIABLE}: {', '.join(unknown)} changes what is reserved, which is predicted without it")
    return notes


def use_segments(expandable: bool, device: torch.device) -> str | None:
    """Set expandable segments; call before the first tensor is on the GPU. On a CPU this does nothing.

    PYTORCH_ALLOC_CONF (or, if unset, PYTORCH_CUDA_ALLOC_CONF) takes precedence.

    Returns:
        A note for the user if the environment contradicts `expandable`; else None.
    """
    if device.type != "cuda":
        return None
    settings = _settings()
    if ANOTHER_ALLOCATOR in settings.replace(" ", ""):
        return _contradiction(expandable, settings, "PyTorch's allocator is not in use")
    from_environment = segments_from_environment()
    if from_environment is None:
        torch._C._accelerator_setAllocatorSettings(
            ",".join(filter(None, (settings, f"expandable_segments:{expandable}")))
        )
        return None
    if from_environment == expandable:
        return None
    return _contradiction(expandable, settings, f"{str(from_environment).lower()} is used")


def _settings() -> str:
    """Settings of PyTorch's allocator; torch 2.11 cannot return them, so there the environment variables."""
    if hasattr(torch._C, "_accelerator_getAllocatorSettings"):
        return str(torch._C._accelerator_getAllocatorSettings())
    return os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))


def _contradiction(expandable: bool, settings: str, effect: str) -> str:
    """The note on an environment that contradicts params.yaml."""
    return (
        f"train.expandable_segments: is {str(expandable).lower()}, but {VARIABLE} says {settings}: {effect}; reserved "
        "memory is predicted for that only if stage estimate ran in the same environment"
    )
