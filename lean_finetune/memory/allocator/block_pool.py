"""One pool of the caching allocator: its free blocks in best-fit order, and address ranges that have no memory.

A free block is one integer, its size above its address, so that sorted integers are in the allocator's best-fit order.
Segments never touch each other. Blocks that touch therefore belong to one segment and may merge.
"""

from bisect import bisect_left, insort

ADDRESS_BITS = 48
ADDRESS_MASK = (1 << ADDRESS_BITS) - 1


class BlockPool:
    """Free and unmapped ranges of the pool of small or of large blocks. Addresses and sizes are in allocator units."""

    __slots__ = ("fits", "free", "free_ends", "min_remainder", "page", "segments", "unmapped", "unmapped_ends")

    def __init__(self, *, page: int, min_remainder: int):
        """Create an empty pool.

        `page` is the size of a new segment, and of the pages by which an expandable segment grows. A block is split if
        at least `min_remainder` units remain.
        """
        self.page, self.min_remainder = page, min_remainder
        self.fits: list[int] = []
        """Free blocks as size << ADDRESS_BITS | start, ascending: the first that is large enough fits best."""
        self.free: dict[int, int] = {}
        """Size of the free block at a start."""
        self.free_ends: dict[int, int] = {}
        """Start of the free block that ends at an address."""
        self.unmapped: dict[int, int] = {}
        """Size of the range of an expandable segment that has addresses but no memory, by start."""
        self.unmapped_ends: dict[int, int] = {}
        """Start of the unmapped range that ends at an address."""
        self.segments: dict[int, int] = {}
        """Size of the segment at a start; for an expandable segment, the size of its address range."""

    def put(self, start: int, size: int) -> None:
        """Add a free block and merge it with its free neighbours."""
        before = self.free_ends.pop(start, None)
        if before is not None:
            self._remove_fit(before, self.free.pop(before))
            size, start = size + start - before, before
        end = start + size
        after = self.free.pop(end, None)
        if after is not None:
            self._remove_fit(end, after)
            size += after
            end += after
        self.free[start], self.free_ends[end] = size, start
        insort(self.fits, size << ADDRESS_BITS | start)

    def take(self, start: int) -> int:
        """Remove the free block at `start` and return its size."""
        size = self.free.pop(start)
        del self.free_ends[start + size]
        self._remove_fit(start, size)
        return size

    def put_unmapped(self, start: int, size: int) -> int:
        """Add a range without memory, merge it with its unmapped neighbours, and return the start of the result."""
        before = self.unmapped_ends.pop(start, None)
        if before is not None:
            size, start = size + self.unmapped.pop(before), before
        after = self.unmapped.pop(start + size, 0)
        size += after
        self.unmapped[start], self.unmapped_ends[start + size] = size, start
        return start

    def take_unmapped(self, start: int) -> int:
        """Remove the range without memory at `start` and return its size."""
        size = self.unmapped.pop(start)
        del self.unmapped_ends[start + size]
        return size

    def start_before(self, unmapped_start: int) -> int:
        """Return where a block could begin that extends into an unmapped range: a free block before it counts."""
        return self.free_ends.get(unmapped_start, unmapped_start)

    def room(self, start: int) -> int:
        """Return how many units from `start` on hold no live block, mapped or not."""
        end = start
        while size := self.free.get(end) or self.unmapped.get(end):
            end += size
        return end - start

    def best_expandable_fit(self, place: int) -> int:
        """Return the best fit from `place` of `fits` on, where each block counts with the unmapped range behind it."""

        def expandable_size(place: int) -> int:
            size, start = self.fits[place] >> ADDRESS_BITS, self.fits[place] & ADDRESS_MASK
            return size + self.unmapped.get(start + size, 0)

        while place + 1 < len(self.fits) and expandable_size(place + 1) < expandable_size(place):
            place += 1
        return place

    def _remove_fit(self, start: int, size: int) -> None:
        del self.fits[bisect_left(self.fits, size << ADDRESS_BITS | start)]
