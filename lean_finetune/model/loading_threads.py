"""Whether transformers converts weights in threads while it loads them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

NO_THREADS = "HF_DEACTIVATE_ASYNC_LOAD"
"""The variable of the environment by which transformers loads without threads."""


@contextmanager
def loading_threads(device: torch.device) -> Iterator[None]:
    """Have transformers convert weights in threads of its own only where a GPU waits for them.

    On a CPU they save no time, and what they allocate is hidden from the profiler, which counts memory there.
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
