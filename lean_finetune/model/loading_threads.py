"""Decide whether transformers loads weights in threads."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

NO_THREADS = "HF_DEACTIVATE_ASYNC_LOAD"
"""Environment variable that makes transformers load without threads."""


@contextmanager
def loading_threads(device: torch.device) -> Iterator[None]:
    """A context in which transformers loads in threads on GPUs only.

    On a CPU threads save no time, and the memory profiler does not see their allocations.
    """
    if device.type != "cpu":
        yield
        return
    before = os.environ.get(NO_THREADS)
    os.environ[NO_THREADS] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[NO_THREADS]
        else:
            os.environ[NO_THREADS] = before
