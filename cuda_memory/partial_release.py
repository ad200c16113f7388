"""Two rules by which the caching allocator releases a part of its free segments, before it releases all of them.

Both are off by default. They are read in PyTorch's source; no recording shows them.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from cuda_memory.block_pool import ADDRESS_BITS, BlockPool
from cuda_memory.settings import UNIT_BYTES

if TYPE_CHECKING:
    from cuda_memory.caching_allocator import CachingAllocator


def collect_garbage(allocator: CachingAllocator) -> None:
    """Release segments of the large pools, those first that were unused for longest: garbage_collection_threshold.

    Above that share of the capacity, those that are older than the average are released, until the excess is.
    """
    threshold = allocator.settings.garbage_collection_threshold
    if threshold is None:
        return
    assert allocator.capacity_bytes is not None
    excess = allocator.reserved_bytes - int(threshold * allocator.capacity_bytes)
    if excess <= 0:
        return
    idle = [
        (allocator.searches - allocator.free_since.get(call.start, 0), pool, call)
        for pool, call in allocator.releasable()
        if call.action == "segment_free" and not pool.is_small
    ]
    while excess > 0 and idle:
        average = sum(age for age, _, _ in idle) / len(idle)
        for age, pool, call in idle:
            if age >= average:
                allocator.release(pool, call)
                excess -= call.size * UNIT_BYTES
        idle = [found for found in idle if found[0] < average]


def release_oversize(allocator: CachingAllocator, pool: BlockPool, wanted: int) -> bool:
    """With max_split_size_mb, release blocks that are never split for a request; return whether it was enough."""
    if allocator.max_split is None:
        return False
    target = max(wanted, allocator.max_split)
    place = bisect_left(pool.fits, target << ADDRESS_BITS)
    larger = pool.release_of(pool.fits[place]) if place < len(pool.fits) else None
    if larger is not None and larger.action == "segment_free":
        allocator.release(pool, larger)
        return True
    released = 0
    for fit in reversed(pool.fits[:place]):
        if released >= target or fit >> ADDRESS_BITS < allocator.max_split:
            break
        call = pool.release_of(fit)
        if call is not None and call.action == "segment_free":
            allocator.release(pool, call)
            released += call.size
    return released >= target
