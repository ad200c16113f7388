"""What keeps the memory of tokenize's processes small; it changes no result."""

import ctypes
import gc
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

# Of glibc's mallopt.
M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8
# Blocks and their tokens are larger: each is mapped by itself and given back when freed. By default glibc raises the
# threshold to 32 MiB as soon as one is freed, and then keeps them on its heap.
MAPPED_BYTES = 1 << 18
# Sizes of this process in pages, its address space first; only Linux has it.
STATM = Path("/proc/self/statm")


def keep_memory_small() -> None:
    """Have freed buffers given back to the system, by malloc and by Arrow: 20 MB less over three processes."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)
        mallopt(M_ARENA_MAX, 1)
    # Arrow's own allocator keeps what it frees.
    pa.set_memory_pool(pa.system_memory_pool())


def give_back_free_memory() -> None:
    """Return to the system what malloc keeps for later, before each fork counts it as its own.

    Building a tokenizer leaves 24 MB of it for a vocabulary of 32,000, in each process. Only glibc has a call for it.
    Until `gc.unfreeze`, the collector passes over what lives now: it would write to each page of it that forks share.
    """
    gc.collect()
    gc.freeze()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextmanager
def bounded_growth(size_bytes: int) -> Iterator[None]:
    """Inside, this process can take at most `size_bytes` more: past that, Python raises MemoryError.

    Jinja's documentation asks for such a limit: its sandbox bounds what a template may touch, not what it may fill.
    The limit is the process's own, so it is set only where the main thread renders, and no worker thread beside it.
    """
    if threading.current_thread() is not threading.main_thread() or not STATM.exists():
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = int(STATM.read_text().split()[0]) * resource.getpagesize() + size_bytes
    others = [one for one in (soft, hard) if one != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min([limit, *others]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
