"""Emulate PyTorch's CUDA caching allocator: how much a sequence of allocations and frees makes it reserve.

The rules are those of c10/cuda/CUDACachingAllocator.cpp as PyTorch has had them since 2.1, read in the source of 2.6;
the constants are those of the headers of 2.13. They hold for the default settings (no max_split_size_mb,
roundup_power2_divisions or garbage_collection_threshold; expandable_segments on or off) and for one stream. The driver
chooses the address of a new segment, which only matters between free blocks of equal size. Here addresses rise.

Sizes inside are in units of 512 bytes, to which the allocator rounds every request.
"""

from bisect import bisect_left, insort

from lean_finetune.core.units import MIB, readable_size
from lean_finetune.memory.allocator.block_pool import ADDRESS_BITS, ADDRESS_MASK, BlockPool

UNIT_BYTES = 512
"""Every request is rounded up to a multiple of this (kMinBlockSize)."""
MIB_UNITS = MIB // UNIT_BYTES
SMALL_UNITS = MIB_UNITS
"""Largest request that the small pool serves (kSmallSize)."""
SMALL_SEGMENT_UNITS = 2 * MIB_UNITS
"""Size of a segment of the small pool, and of the pages of its expandable segment (kSmallBuffer)."""
LARGE_SEGMENT_UNITS = 20 * MIB_UNITS
"""Size of a segment for large requests below OWN_SEGMENT_UNITS, and of the pages of the large pool (kLargeBuffer)."""
OWN_SEGMENT_UNITS = 10 * MIB_UNITS
"""Smallest request that gets a segment to itself (kMinLargeAlloc)."""
OWN_SEGMENT_STEP_UNITS = 2 * MIB_UNITS
"""The size of such a segment is rounded up to a multiple of this (kRoundLarge)."""
MIN_REMAINDER_UNITS = 1
"""A block of the small pool or of an expandable segment is split if at least so much remains."""
MIN_LARGE_REMAINDER_UNITS = MIB_UNITS + 1
"""The same for fixed segments of the large pool: more than 1 MiB."""
UNLIMITED_SPACE_UNITS = 1 << 36
"""Address range of an expandable segment if there is no capacity: 32 TiB."""


class OutOfMemory(Exception):
    """The device cannot serve a request, even after the allocator released every cached block."""


class CachingAllocator:
    """The caching allocator of one GPU and one stream."""

    def __init__(self, *, expandable: bool, capacity_bytes: int | None):
        """Create an allocator that has nothing reserved; `capacity_bytes` of device memory, None for no limit."""
        self.expandable, self.capacity_bytes = expandable, capacity_bytes
        min_large_remainder = MIN_REMAINDER_UNITS if expandable else MIN_LARGE_REMAINDER_UNITS
        self._small = BlockPool(page=SMALL_SEGMENT_UNITS, min_remainder=MIN_REMAINDER_UNITS)
        self._large = BlockPool(page=LARGE_SEGMENT_UNITS, min_remainder=min_large_remainder)
        self._live: dict[int, int] = {}
        self._next_segment = 0
        self.allocated_bytes = self.peak_allocated_bytes = 0
        """In live blocks, now and at most since the start or `reset_peaks`: torch.cuda.memory_allocated."""
        self.reserved_bytes = self.peak_reserved_bytes = 0
        """Reserved from the driver, now and at most: torch.cuda.memory_reserved."""
        self.retries = 0
        """How often all cached blocks were released to serve a request (num_alloc_retries)."""

    def reset_peaks(self) -> None:
        """Start both peaks anew: torch.cuda.reset_peak_memory_stats."""
        self.peak_allocated_bytes, self.peak_reserved_bytes = self.allocated_bytes, self.reserved_bytes

    def allocate(self, count_bytes: int) -> int:
        """Serve a request of at least one byte and return a handle for `free`.

        Raises:
            OutOfMemory: the capacity is exhausted, even after cached blocks were released.
            ValueError: the request is empty.
        """
        if count_bytes < 1:
            raise ValueError(f"a request is at least one byte, got {count_bytes}")
        wanted = (count_bytes + UNIT_BYTES - 1) // UNIT_BYTES
        pool = self._small if wanted <= SMALL_UNITS else self._large
        place = bisect_left(pool.fits, wanted << ADDRESS_BITS)
        if place == len(pool.fits):
            start, size = self._new_block(pool, wanted)
        else:
            if pool.unmapped:
                place = pool.best_expandable_fit(place)
            fit = pool.fits.pop(place)
            start, size = fit & ADDRESS_MASK, fit >> ADDRESS_BITS
            del pool.free[start], pool.free_ends[start + size]
        remainder = size - wanted
        if remainder >= pool.min_remainder:  # The block behind it is in use: nothing to merge.
            insort(pool.fits, remainder << ADDRESS_BITS | (start + wanted))
            pool.free[start + wanted], pool.free_ends[start + size] = remainder, start + wanted
            size = wanted
        self._live[start] = size
        self.allocated_bytes += size * UNIT_BYTES
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return start

    def free(self, handle: int) -> None:
        """Free an allocated block; it stays reserved."""
        size = self._live.pop(handle)
        self.allocated_bytes -= size * UNIT_BYTES
        # Blocks of the small pool are always split, so only they are this small.
        (self._small if size <= SMALL_UNITS else self._large).put(handle, size)

    def release_cached(self) -> None:
        """Release memory that holds no live block to the driver: torch.cuda.empty_cache.

        A fixed segment is released if all of it is free; of an expandable segment, every page that is free.
        """
        for pool in (self._large, self._small):
            for start in [fit & ADDRESS_MASK for fit in pool.fits]:
                if self.expandable:
                    self._unmap(pool, start)
                elif pool.free[start] == pool.segments.get(start):
                    self.reserved_bytes -= pool.take(start) * UNIT_BYTES
                    del pool.segments[start]

    def _new_block(self, pool: BlockPool, wanted: int) -> tuple[int, int]:
        """Reserve a block of at least `wanted` units from the driver; return its start and size.

        Raises:
            OutOfMemory: see `allocate`.
        """
        grow = self._grow_expandable if self.expandable else self._new_segment
        start = grow(pool, wanted)
        if start is None:
            self.release_cached()
            self.retries += 1
            start = grow(pool, wanted)
        if start is None:
            assert self.capacity_bytes is not None
            raise OutOfMemory(
                f"{readable_size(wanted * UNIT_BYTES)} requested with {readable_size(self.allocated_bytes)} allocated "
                f"and {readable_size(self.reserved_bytes)} reserved of {readable_size(self.capacity_bytes)}"
            )
        return start, pool.take(start)

    def _reserve(self, units: int) -> bool:
        """Count memory as reserved; return whether the capacity has room for it."""
        reserved_bytes = self.reserved_bytes + units * UNIT_BYTES
        if self.capacity_bytes is not None and reserved_bytes > self.capacity_bytes:
            return False
        self.reserved_bytes = reserved_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, reserved_bytes)
        return True

    def _new_segment(self, pool: BlockPool, wanted: int) -> int | None:
        """Reserve a fixed segment as one free block; return its start, or None if the capacity is exhausted."""
        size = pool.page
        if wanted >= OWN_SEGMENT_UNITS:
            size = -(-wanted // OWN_SEGMENT_STEP_UNITS) * OWN_SEGMENT_STEP_UNITS
        if not self._reserve(size):
            return None
        start = self._addresses(size)
        pool.segments[start] = size
        pool.put(start, size)
        return start

    def _addresses(self, size: int) -> int:
        """Return the start of an address range on a page boundary, which touches no other segment."""
        start = self._next_segment
        self._next_segment = start + (size // LARGE_SEGMENT_UNITS + 2) * LARGE_SEGMENT_UNITS
        return start

    def _grow_expandable(self, pool: BlockPool, wanted: int) -> int | None:
        """Map pages at the lowest address with room, so that a free block has `wanted` units.

        Returns the start of that block, or None if the capacity is exhausted. As in PyTorch, pages that were already
        mapped for the request then stay mapped.
        """
        start = next((s for s in map(pool.start_before, sorted(pool.unmapped)) if pool.room(s) >= wanted), None)
        if start is None:
            start = self._new_expandable_segment(pool, wanted)
        while (free := pool.free.get(start, 0)) < wanted:
            hole = start + free
            size = pool.unmapped[hole]
            mapped = -(-min(wanted - free, size) // pool.page) * pool.page
            if not self._reserve(mapped):
                return None
            pool.take_unmapped(hole)
            if mapped < size:
                pool.put_unmapped(hole + mapped, size - mapped)
            pool.put(hole, mapped)
        return start

    def _new_expandable_segment(self, pool: BlockPool, wanted: int) -> int:
        """Add an address range of 9/8 of the device, as PyTorch does, which leaves room for holes; return its start."""
        capacity = self.capacity_bytes
        space = UNLIMITED_SPACE_UNITS if capacity is None else capacity // UNIT_BYTES * 9 // 8
        size = -(-max(space, wanted) // pool.page) * pool.page
        start = self._addresses(size)
        pool.segments[start] = size
        pool.put_unmapped(start, size)
        return start

    def _unmap(self, pool: BlockPool, start: int) -> None:
        """Release the whole pages inside a free block, and the segment itself once none of it is mapped."""
        end = start + pool.free[start]
        first, last = -(-start // pool.page) * pool.page, end // pool.page * pool.page
        if first >= last:
            return
        pool.take(start)
        if start < first:
            pool.put(start, first - start)
        if last < end:
            pool.put(last, end - last)
        self.reserved_bytes -= (last - first) * UNIT_BYTES
        hole = pool.put_unmapped(first, last - first)
        if pool.segments.get(hole) == pool.unmapped[hole]:
            pool.take_unmapped(hole)
            del pool.segments[hole]
