"""A phase of the traced step, in which libraries find autocast as they would on CUDA."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from lean_finetune.memory.trace.memory_trace import MemoryTrace


@contextmanager
def phase_of(trace: MemoryTrace, name: str, *, like_cuda: bool, on_host: bool = False) -> Iterator[None]:
    """The step's phase hook; `like_cuda` also tells libraries that CUDA's autocast is on, since peft asks for it.

    `on_host`: the phase computes in the host's memory.
    """
    before = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", like_cuda)
    try:
        with trace.phase(name), trace.elsewhere() if on_host else nullcontext():
            yield
    finally:
        torch.set_autocast_enabled("cuda", before)
