"""One pool of the caching allocator: its free blocks in best-fit order, and address ranges that have no memory.

A free block is one integer, its size above its address, so that sorted integers are in the allocator's best-fit order.
Blocks that touch may merge, unless a segment begins between them.
"""

from bisect import bisect_left, insort
from typing import NamedTuple

ADDRESS_BITS = 48
ADDRESS_MASK = (1 << ADDRESS_BITS) - 1


class DriverCall(NamedTuple):
    """Memory reserved from the driver or released to it. Address and size are in units."""

    action: str
    """`segment_alloc`, `segment_map`, `segment_free` or `segment_unmap`."""
    start: int
    size: int


class BlockPool:
    """Free and unmapped ranges of one stream's small or large blocks. Addresses and sizes are in allocator units."""

    __slots__ = (
        "fits", "free", "free_ends", "is_private", "is_small", "page", "segments", "spaces", "unmapped",
        "unmapped_ends",
    )  # fmt: skip

    def __init__(self, *, page: int, is_small: bool, is_private: bool):
        """Create an empty pool.

        `page` is the size of the pages by which an expandable segment grows. `is_private` is a pool of CUDA graphs,
        whose segments stay reserved as long as the graph exists.
        """
        self.page, self.is_small, self.is_private = page, is_small, is_private
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
        self.spaces: dict[int, int] = {}
        """Those of `segments` that are expandable."""

    def put(self, start: int, size: int) -> int:
        """Add a free block, merge it with its free neighbours, and return the start of the result."""
        if start not in self.segments:
            before = self.free_ends.pop(start, None)
            if before is not None:
                self._remove_fit(before, self.free.pop(before))
                size, start = size + start - before, before
        end = start + size
        after = None if end in self.segments else self.free.pop(end, None)
        if after is not None:
            self._remove_fit(end, after)
            size += after
            end += after
        self.free[start], self.free_ends[end] = size, start
        insort(self.fits, size << ADDRESS_BITS | start)
        return start

    def take(self, start: int) -> int:
        """Remove the free block at `start` and return its size."""
        size = self.free.pop(start)
        del self.free_ends[start + size]
        self._remove_fit(start, size)
        return size

    def put_unmapped(self, start: int, size: int) -> int:
        """Add a range without memory, merge it with its unmapped neighbours, and return the start of the result."""
        before = None if start in self.segments else self.unmapped_ends.pop(start, None)
        if before is not None:
            size, start = size + self.unmapped.pop(before), before
        after = 0 if start + size in self.segments else self.unmapped.pop(start + size, 0)
        size += after
        self.unmapped[start], self.unmapped_ends[start + size] = size, start
        return start

    def take_unmapped(self, start: int) -> int:
        """Remove the range without memory at `start` and return its size."""
        size = self.unmapped.pop(start)
        del self.unmapped_ends[start + size]
        return size

    def lowest_room(self, wanted: int) -> int | None:
        """Return the lowest start of `wanted` units of an expandable segment that hold no live block; None for none.

        The range has addresses to map, and may begin with the free block before them.
        """
        for hole in sorted(self.unmapped):
            start = hole if hole in self.segments else self.free_ends.get(hole, hole)
            end = start
            while end - start < wanted and (size := self.free.get(end) or self.unmapped.get(end)):
                end += size
                if end in self.segments:
                    break
            if end - start >= wanted:
                return start
        return None

    def releasable(self) -> list[DriverCall]:
        """What can be released: each fixed segment and each page of an expandable one that is free."""
        return [call for fit in self.fits if (call := self.release_of(fit)) is not None]

    def release_of(self, fit: int) -> DriverCall | None:
        """The part of a block of `fits` that can be released; None if none can."""
        size, start = fit >> ADDRESS_BITS, fit & ADDRESS_MASK
        if not self.is_expandable(start):
            return DriverCall("segment_free", start, size) if size == self.segments.get(start) else None
        space = next(space for space, length in self.spaces.items() if space <= start < space + length)
        first = space + -(-(start - space) // self.page) * self.page
        last = space + (start + size - space) // self.page * self.page
        return DriverCall("segment_unmap", first, last - first) if first < last else None

    def release(self, call: DriverCall) -> None:
        """Release a free segment, or free pages of an expandable one, and the segment itself once none is mapped."""
        _, first, size = call
        if call.action == "segment_free":
            self.take(first)
            del self.segments[first]
            return
        last = first + size
        start = self.free_block_at(first)
        assert start is not None
        end = start + self.take(start)
        if start < first:
            self.put(start, first - start)
        if last < end:
            self.put(last, end - last)
        hole = self.put_unmapped(first, size)
        if self.segments.get(hole) == self.unmapped[hole]:
            self.take_unmapped(hole)
            del self.segments[hole], self.spaces[hole]

    def can_release(self, call: DriverCall) -> bool:
        """Whether a call releases a free segment as a whole, or free pages of an expandable one."""
        start = self.free_block_at(call.start)
        if start is None:
            return False
        most = self.release_of(self.free[start] << ADDRESS_BITS | start)
        if most is None or most.action != call.action:
            return False
        offset = call.start - most.start
        if call.action == "segment_free":
            return call == most
        return offset % self.page == call.size % self.page == 0 < call.size and 0 <= offset <= most.size - call.size

    def is_unmapped(self, start: int, size: int) -> bool:
        """Whether a range of an expandable segment has addresses but no memory."""
        return any(hole <= start and start + size <= hole + room for hole, room in self.unmapped.items())

    def free_block_at(self, address: int) -> int | None:
        """The start of the free block that contains an address; None if none does."""
        if address in self.free:
            return address
        return next((start for start, size in self.free.items() if start < address < start + size), None)

    def segment_at(self, address: int) -> int | None:
        """The start of the segment whose addresses contain one; None if none does."""
        return next((start for start, size in self.segments.items() if start <= address < start + size), None)

    def end_space(self, space: int, end: int) -> bool:
        """End the address range of an expandable segment; return whether nothing is mapped behind the new end."""
        hole = self.unmapped_ends.get(space + self.segments[space])
        if space not in self.spaces or hole is None or hole > end or space == end:
            return False
        self.take_unmapped(hole)
        self.segments[space] = self.spaces[space] = end - space
        if hole < end:
            self.put_unmapped(hole, end - hole)
        return True

    def is_expandable(self, start: int) -> bool:
        """Whether a block lies in an expandable segment."""
        return any(space <= start < space + size for space, size in self.spaces.items())

    def best_expandable_fit(self, place: int) -> int:
        """Return the best fit from `place` of `fits` on, where each block counts with the unmapped range behind it."""

        def expandable_size(place: int) -> int:
            size, start = self.fits[place] >> ADDRESS_BITS, self.fits[place] & ADDRESS_MASK
            return size + (0 if start + size in self.segments else self.unmapped.get(start + size, 0))

        while (
            self.is_expandable(self.fits[place] & ADDRESS_MASK)
            and place + 1 < len(self.fits)
            and expandable_size(place + 1) < expandable_size(place)
        ):
            place += 1
        return place

    def first_fixed_fit(self, place: int) -> int:
        """Return the first of `fits` from `place` on in a segment of fixed size; their number if none is."""
        while place < len(self.fits) and self.is_expandable(self.fits[place] & ADDRESS_MASK):
            place += 1
        return place

    def _remove_fit(self, start: int, size: int) -> None:
        del self.fits[bisect_left(self.fits, size << ADDRESS_BITS | start)]
