"""Allocator settings and limits that keep the memory of tokenize's processes small."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from lean_finetune.core.systems import malloc_function

# Options of glibc's mallopt.
M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8
# Blocks and their tokens are larger than this, so each has its own mapping, which ends when it is freed. By default
# glibc raises the threshold to 32 MiB after the first free, and then keeps freed blocks on its heap.
MAPPED_BYTES = 1 << 18
# Memory sizes of this process in pages, address space first. Linux only.
STATM = Path("/proc/self/statm")


def return_freed_memory() -> None:
    """Make malloc and Arrow return freed buffers to the system: 20 MB less over three processes."""
    mallopt = malloc_function("mallopt")
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)
        mallopt(M_ARENA_MAX, 1)
    # Arrow's default allocator does not return memory.
    pa.set_memory_pool(pa.system_memory_pool())


def prepare_fork() -> None:
    """Return free heap memory to the system (glibc only), and keep the pages that forks share unwritten.

    Building a tokenizer with a vocabulary of 32,000 leaves 24 MB of free heap, which every fork would have.
    Until `gc.unfreeze`, the garbage collector skips existing objects: visiting one writes to its page.
    """
    gc.collect()
    gc.freeze()
    trim = malloc_function("malloc_trim")
    if trim is not None:
        trim(0)


@contextmanager
def limited_memory_growth(size_bytes: int) -> Iterator[None]:
    """Raise MemoryError in the block when this process allocates more than `size_bytes`.

    Jinja's sandbox restricts what a template may access, not the memory it may use; its documentation recommends such
    a limit. The limit counts the whole process, so it is set only in the main thread, never beside worker threads.
    """
    if threading.current_thread() is not threading.main_thread() or not STATM.exists():
        yield
        return
    import resource  # Here: Windows has none.

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = int(STATM.read_text().split()[0]) * resource.getpagesize() + size_bytes
    others = [one for one in (soft, hard) if one != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min([limit, *others]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
