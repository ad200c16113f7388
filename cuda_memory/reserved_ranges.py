"""Which addresses are reserved at an instant of a recording."""

from bisect import bisect_right, insort
from collections.abc import Iterator

from cuda_memory.caching_allocator import Arena


class ReservedRanges:
    """Address ranges that never overlap, each with its arena."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ranges: dict[int, tuple[int, Arena]] = {}
        self.bytes = self.peak_bytes = 0
        """In all ranges, now and at most."""

    def add(self, start: int, size: int, arena: Arena) -> None:
        """Add a range."""
        if start not in self._ranges:
            insort(self._starts, start)
        self._ranges[start] = size, arena
        self.bytes += size
        self.peak_bytes = max(self.peak_bytes, self.bytes)

    def remove(self, start: int, size: int) -> None:
        """Remove what lies in a range; parts of ranges that stick out of it stay."""
        end = start + size
        for first, last, arena in list(self._overlapping(start, end)):
            self._starts.remove(first)
            del self._ranges[first]
            self.bytes -= last - first
            for rest, rest_end in ((first, start), (end, last)):
                if rest < rest_end:
                    self.add(rest, rest_end - rest, arena)

    def arena_of(self, address: int) -> Arena | None:
        """The arena of the range that contains an address; None if none does."""
        return next((arena for _, _, arena in self._overlapping(address, address + 1)), None)

    def is_reserved(self, start: int, size: int) -> bool:
        """Whether any of a range is reserved."""
        return any(True for _ in self._overlapping(start, start + size))

    def end_of_room(self, address: int, most: int) -> int:
        """Where the next range above an address begins; `most` if none does."""
        place = bisect_right(self._starts, address)
        return self._starts[place] if place < len(self._starts) else most

    def _overlapping(self, start: int, end: int) -> Iterator[tuple[int, int, Arena]]:
        place = max(bisect_right(self._starts, start) - 1, 0)
        while place < len(self._starts) and self._starts[place] < end:
            first = self._starts[place]
            size, arena = self._ranges[first]
            if first + size > start:
                yield first, first + size, arena
            place += 1
