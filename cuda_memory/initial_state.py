"""Put memory into a caching allocator that a process has reserved already."""

from collections.abc import Iterable

from cuda_memory.block_pool import BlockPool
from cuda_memory.caching_allocator import CachingAllocator

Blocks = Iterable[tuple[int, int]]
"""Start and size of live blocks, ascending. The rest of the memory around them is free."""


def put_segment(allocator: CachingAllocator, pool: BlockPool, start: int, size: int, live: Blocks) -> None:
    """Put in a segment of fixed size. Addresses and sizes are in units."""
    pool.segments[start] = size
    _put_reserved(allocator, pool, start, size, live)


def put_expandable_segment(
    allocator: CachingAllocator, pool: BlockPool, start: int, size: int, mapped: Iterable[tuple[int, int, Blocks]]
) -> None:
    """Put in an expandable segment by its address range and the ranges in it that have memory, ascending."""
    pool.segments[start] = pool.spaces[start] = size
    place = start
    for first, count, live in mapped:
        if first > place:
            pool.put_unmapped(place, first - place)
        _put_reserved(allocator, pool, first, count, live)
        place = first + count
    if place < start + size:
        pool.put_unmapped(place, start + size - place)


def _put_reserved(allocator: CachingAllocator, pool: BlockPool, start: int, size: int, live: Blocks) -> None:
    place = start
    for block, count in live:
        if block > place:
            pool.put(place, block - place)
        allocator.add_live(pool, block, count)
        place = block + count
    if place < start + size:
        pool.put(place, start + size - place)
    allocator.count_reserved(size)
