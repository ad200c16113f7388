"""The ranges one pool of the caching allocator keeps: free blocks in order of best fit, and addresses without memory.

A free block is one integer, its size above its address, so that the order of integers is the allocator's order of best
fit. Segments never touch each other, so that blocks which touch belong to one segment and may merge.
"""

from bisect import bisect_left, insort
from collections.abc import Hashable

ADDRESS_BITS = 48
ADDRESS_MASK = (1 << ADDRESS_BITS) - 1


class BlockPool:
    """Free and unmapped ranges of the small or the large pool of blocks, in the allocator's units."""

    __slots__ = ("fits", "free", "free_ends", "least_rest", "page", "segments", "unmapped", "unmapped_ends")

    def __init__(self, *, page: int, least_rest: int):
        """An empty pool: segments or pages of `page` units; a block is split if `least_rest` units remain."""
        self.page, self.least_rest = page, least_rest
        self.fits: list[int] = []
        """Free blocks as size << ADDRESS_BITS | start, ascending: the first that is large enough fits best."""
        self.free: dict[int, int] = {}
        """Size of the free block at a start."""
        self.free_ends: dict[int, int] = {}
        """Start of the free block that ends there."""
        self.unmapped: dict[int, int] = {}
        """Size of the range of an expandable segment that has addresses but no memory, by start."""
        self.unmapped_ends: dict[int, int] = {}
        self.segments: dict[int, int] = {}
        """Size of the segment (of an expandable one: its addresses) at a start."""

    @property
    def mapped(self) -> int:
        """Memory taken from the driver."""
        return sum(self.segments.values()) - sum(self.unmapped.values())

    def put(self, start: int, size: int) -> None:
        """Add a free block, merged with the free blocks beside it; segments never touch each other."""
        before = self.free_ends.pop(start, None)
        if before is not None:
            self._unfit(before, self.free.pop(before))
            size, start = size + start - before, before
        end = start + size
        after = self.free.pop(end, None)
        if after is not None:
            self._unfit(end, after)
            size += after
            end += after
        self.free[start], self.free_ends[end] = size, start
        insort(self.fits, size << ADDRESS_BITS | start)

    def take(self, start: int) -> int:
        """Remove the free block at `start` and return its size."""
        size = self.free.pop(start)
        del self.free_ends[start + size]
        self._unfit(start, size)
        return size

    def put_unmapped(self, start: int, size: int) -> int:
        """Add a range without memory, merged with those beside it; returns where it starts then."""
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

    def run_start(self, hole: int) -> int:
        """Where one can allocate across the range without memory at `hole`: also from a free block before it."""
        return self.free_ends.get(hole, hole)

    def room(self, start: int) -> int:
        """Units from `start` on that hold no live block, mapped or not."""
        end = start
        while size := self.free.get(end) or self.unmapped.get(end):
            end += size
        return end - start

    def copy(self) -> "BlockPool":
        """The same pool, to be changed on its own."""
        other = BlockPool(page=self.page, least_rest=self.least_rest)
        other.fits, other.free, other.free_ends = self.fits.copy(), self.free.copy(), self.free_ends.copy()
        other.unmapped, other.unmapped_ends = self.unmapped.copy(), self.unmapped_ends.copy()
        other.segments = self.segments.copy()
        return other

    def state(self) -> Hashable:
        """All that decides what this pool will do."""
        return tuple(self.fits), frozenset(self.unmapped.items()), frozenset(self.segments.items())

    def least_expandable(self, place: int) -> int:
        """Best fit from `place` on where blocks can grow: a block counts as large as it can become."""
        size = self._expandable_size(place)
        while place + 1 < len(self.fits) and (after := self._expandable_size(place + 1)) < size:
            place, size = place + 1, after
        return place

    def _expandable_size(self, place: int) -> int:
        """Units of the free block at a place of `fits` and of the range behind it that could be mapped."""
        size, start = self.fits[place] >> ADDRESS_BITS, self.fits[place] & ADDRESS_MASK
        return size + self.unmapped.get(start + size, 0)

    def _unfit(self, start: int, size: int) -> None:
        """Take a block out of the order of fit."""
        del self.fits[bisect_left(self.fits, size << ADDRESS_BITS | start)]
