"""Emulate PyTorch's CUDA caching allocator: how much a sequence of allocations and frees makes it reserve.

The rules are those of c10/cuda/CUDACachingAllocator.cpp as PyTorch has had them since 2.1, read in the source of 2.6
and of 2.10; the constants are those of the headers of 2.13. The driver chooses the address of a new segment, which only
matters between free blocks of equal size. Here addresses rise, unless the caller knows them.

Recordings of GPUs (benchmarks/cuda_traces.py) confirm the rules for pools, streams, best fit, splitting, merging, sizes
of segments, mapping and unmapping pages of expandable segments, releases, retries and running out of memory. Only read
in the source (c10/core/AllocatorConfig.cpp too) are those for `AllocatorSettings` with other values than the defaults,
for private pools, and for an expandable segment that outgrows its addresses.

Sizes inside are in units of 512 bytes, to which the allocator rounds every request.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from cuda_memory.block_pool import ADDRESS_BITS, ADDRESS_MASK, BlockPool, DriverCall
from cuda_memory.errors import UserError
from cuda_memory.units import MIB, readable_size

UNIT_BYTES = 512
"""Every request is rounded up to a multiple of this (kMinBlockSize)."""
MIB_UNITS = MIB // UNIT_BYTES
SMALL_UNITS = MIB_UNITS
"""Largest request that the small pool serves (kSmallSize)."""
SMALL_SEGMENT_UNITS = 2 * MIB_UNITS
"""Size of a segment of the small pool, and of the pages of its expandable segment (kSmallBuffer)."""
OWN_SEGMENT_UNITS = 10 * MIB_UNITS
"""Smallest request that gets a segment to itself (kMinLargeAlloc)."""
OWN_SEGMENT_STEP_UNITS = 2 * MIB_UNITS
"""The size of such a segment is rounded up to a multiple of this (kRoundLarge)."""

MAX_SHOWN = 40
"""Characters of a refused value that a message shows: a file may contain values of any length."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatorSettings:
    """What PYTORCH_CUDA_ALLOC_CONF sets, besides expandable_segments. The defaults are PyTorch's."""

    max_split_bytes: int | None = None
    """max_split_size_mb: free blocks of this size and more are not split; None for no limit."""
    max_non_split_rounding_bytes: int = 20 * MIB
    """max_non_split_rounding_mb: such a block serves requests that are smaller by less than this."""
    garbage_collection_threshold: float | None = None
    """Share of the capacity above which segments that were unused for long are released."""
    roundup_power2_divisions: tuple[int, ...] = ()
    """Divisions between two powers of two to which a request is rounded up, by interval; 0 or empty for 512 bytes."""
    large_segment_bytes: int = 20 * MIB
    """large_segment_size_mb, a newer setting: segments for requests from 1 to 10 MiB, and pages of the large pool."""

    def __post_init__(self) -> None:
        """Refuse what PyTorch refuses.

        Raises:
            UserError: a value that PyTorch does not take.
        """
        limit = self.max_split_bytes
        if limit is not None and limit < 20 * MIB:
            raise UserError(f"max_split_size_mb: must be at least 20, as PyTorch demands; got {limit / MIB:g}")
        if not MIB <= self.large_segment_bytes <= 1 << 40:
            got_mb = str(self.large_segment_bytes // MIB)[:MAX_SHOWN]
            raise UserError(f"large_segment_size_mb: must be from 1 to {1 << 20}; got {got_mb}")
        threshold = self.garbage_collection_threshold
        if threshold is not None and not 0 < threshold < 1:
            raise UserError(f"garbage_collection_threshold: must be between 0 and 1, both excluded; got {threshold}")
        if any(divisions & (divisions - 1) for divisions in self.roundup_power2_divisions):
            got = str(self.roundup_power2_divisions)[:MAX_SHOWN]
            raise UserError(f"roundup_power2_divisions: every number must be a power of two, or 0; got {got}")

    def round_up(self, count_bytes: int) -> int:
        """The size in units of the block for a request."""
        divisions = self._divisions(count_bytes)
        if divisions <= 1 or count_bytes <= UNIT_BYTES * divisions:
            return (count_bytes + UNIT_BYTES - 1) // UNIT_BYTES
        floor = 1 << count_bytes.bit_length() - 1
        step = floor // divisions
        return -(-count_bytes // step) * step // UNIT_BYTES

    def _divisions(self, count_bytes: int) -> int:
        """The divisions of the interval of a request: below 2 MiB, from 2 to 4 MiB, …, from 32 GiB on."""
        if not self.roundup_power2_divisions:
            return 0
        interval = max(0, count_bytes.bit_length() - MIB.bit_length())
        return self.roundup_power2_divisions[min(interval, len(self.roundup_power2_divisions) - 1)]

    def segment_units(self, wanted: int) -> int:
        """The size of a new segment of fixed size for a request, both in units."""
        if wanted <= SMALL_UNITS:
            return SMALL_SEGMENT_UNITS
        if wanted < OWN_SEGMENT_UNITS:
            return self.large_segment_bytes // UNIT_BYTES
        return -(-wanted // OWN_SEGMENT_STEP_UNITS) * OWN_SEGMENT_STEP_UNITS

    def page_units(self, *, is_small: bool) -> int:
        """By how much a segment that expands grows."""
        return SMALL_SEGMENT_UNITS if is_small else self.large_segment_bytes // UNIT_BYTES


LARGE_SEGMENT_UNITS = 20 * MIB_UNITS
"""New segments begin at multiples of this."""
MIN_REMAINDER_UNITS = 1
"""A block of the small pool or of an expandable segment is split if at least so much remains."""
MIN_LARGE_REMAINDER_UNITS = MIB_UNITS + 1
"""The same for fixed segments of the large pool: more than 1 MiB."""
UNLIMITED_SPACE_UNITS = 1 << 36
"""Address range of an expandable segment if there is no capacity: 32 TiB."""


class CapacityExceeded(Exception):
    """The device cannot serve a request, even after the allocator released every cached block."""


class Arena(NamedTuple):
    """What may share blocks: one stream, and one private pool of it."""

    stream: int = 0
    private_pool: tuple[int, int] = (0, 0)
    """Id of a pool of CUDA graphs; (0, 0) is the default pool."""


DEFAULT_ARENA = Arena()
DEFAULT_SETTINGS = AllocatorSettings()


class CachingAllocator:
    """The caching allocator of one GPU."""

    def __init__(self, *, expandable: bool, capacity_bytes: int | None, settings: AllocatorSettings = DEFAULT_SETTINGS):
        """Create an allocator that has nothing reserved; `capacity_bytes` of device memory, None for no limit.

        Raises:
            UserError: a garbage collection without a limit.
        """
        if settings.garbage_collection_threshold is not None and capacity_bytes is None:
            raise UserError(
                "garbage_collection_threshold: has no effect without a limit, in PyTorch that of "
                "torch.cuda.set_per_process_memory_fraction; set one"
            )
        self.expandable, self.capacity_bytes, self.settings = expandable, capacity_bytes, settings
        limit = settings.max_split_bytes
        self.max_split = None if limit is None else limit // UNIT_BYTES
        """Units from which on a block is not split; None for no limit."""
        self._arenas: dict[Arena, tuple[BlockPool, BlockPool]] = {}
        self._live: dict[int, int] = {}
        self._pool_of: dict[int, BlockPool] = {}
        self.pending: dict[int, int] = {}
        """Handles of blocks that the program freed and another stream still uses, by any name. Where memory is short,
        the allocator waits for that stream and frees them."""
        self.next_address = 0
        """Start of the next segment, unless `next_segment` says another."""
        self.next_segment: tuple[int, int] | None = None
        """Where the caller knows what the driver will answer: start of the next segment, and its size in units, or the
        address range that an expandable one may have."""
        self.driver_calls: list[DriverCall] = []
        """Every call so far; the caller may clear it."""
        self.allocated_bytes = self.peak_allocated_bytes = 0
        """In live blocks, now and at most since the start or `reset_peaks`: torch.cuda.memory_allocated."""
        self.reserved_bytes = self.peak_reserved_bytes = 0
        """Reserved from the driver, now and at most: torch.cuda.memory_reserved."""
        self.retries = 0
        """How often all cached blocks were released to serve a request (num_alloc_retries)."""
        self.searches = 0
        """Number of searches in the large pools, by which the garbage collection measures age."""
        self.free_since: dict[int, int] = {}
        """`searches` when a block became free, by start."""

    def reset_peaks(self) -> None:
        """Start both peaks anew: torch.cuda.reset_peak_memory_stats."""
        self.peak_allocated_bytes, self.peak_reserved_bytes = self.allocated_bytes, self.reserved_bytes

    def pool(self, arena: Arena, *, is_small: bool) -> BlockPool:
        """The pool of small or of large blocks of an arena."""
        pools = self._arenas.get(arena)
        if pools is None:
            small, large = (
                BlockPool(
                    page=self.settings.page_units(is_small=small),
                    is_small=small,
                    is_private=arena.private_pool != (0, 0),
                )
                for small in (True, False)
            )
            pools = self._arenas[arena] = small, large
        return pools[0] if is_small else pools[1]

    def pools(self) -> list[BlockPool]:
        """Every pool."""
        return [pool for arena in self._arenas.values() for pool in reversed(arena)]

    def allocate(self, count_bytes: int, arena: Arena = DEFAULT_ARENA) -> int:
        """Serve a request of at least one byte and return a handle for `free`: its address in units.

        Raises:
            CapacityExceeded: the capacity is exhausted, even after cached blocks were released.
            ValueError: the request is empty.
        """
        if count_bytes < 1:
            raise ValueError(f"a request is at least one byte, got {count_bytes}")
        wanted = self.settings.round_up(count_bytes)
        pool = self.pool(arena, is_small=wanted <= SMALL_UNITS)
        self.searches += not pool.is_small
        place = self._best_fit(pool, wanted)
        if place is None:
            start, size = self._new_block(pool, wanted)
        else:
            fit = pool.fits.pop(place)
            start, size = fit & ADDRESS_MASK, fit >> ADDRESS_BITS
            del pool.free[start], pool.free_ends[start + size]
        if self._is_split(pool, wanted, size - wanted):  # The block behind it is in use: nothing to merge.
            rest = start + wanted
            insort(pool.fits, (size - wanted) << ADDRESS_BITS | rest)
            pool.free[rest], pool.free_ends[start + size] = size - wanted, rest
            self.free_since[rest] = self.searches
            size = wanted
        self.add_live(pool, start, size)
        return start

    def add_live(self, pool: BlockPool, start: int, size: int) -> None:
        """Count a block as allocated."""
        self._live[start], self._pool_of[start] = size, pool
        self.allocated_bytes += size * UNIT_BYTES
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)

    def count_reserved(self, size: int) -> None:
        """Count units as reserved."""
        self.reserved_bytes += size * UNIT_BYTES
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _is_split(self, pool: BlockPool, wanted: int, remainder: int) -> bool:
        """Whether the remainder of a block becomes a free block."""
        if pool.is_small or self.expandable:
            return remainder >= MIN_REMAINDER_UNITS
        return remainder >= MIN_LARGE_REMAINDER_UNITS and (self.max_split is None or wanted < self.max_split)

    def _best_fit(self, pool: BlockPool, wanted: int) -> int | None:
        """The place in `pool.fits` of the free block that serves a request; None if none does."""
        place = bisect_left(pool.fits, wanted << ADDRESS_BITS)
        if place < len(pool.fits) and pool.spaces:
            place = pool.best_expandable_fit(place) if self.expandable else pool.first_fixed_fit(place)
        if place == len(pool.fits):
            return None
        if self.max_split is not None:
            size = pool.fits[place] >> ADDRESS_BITS
            rounding = self.settings.max_non_split_rounding_bytes // UNIT_BYTES
            if size >= (self.max_split if wanted < self.max_split else wanted + rounding):
                return None
        return place

    def free(self, handle: int) -> None:
        """Free an allocated block; it stays reserved."""
        size, pool = self._live.pop(handle), self._pool_of.pop(handle)
        self.allocated_bytes -= size * UNIT_BYTES
        self.free_since[pool.put(handle, size)] = self.searches

    def live_blocks(self) -> dict[int, int]:
        """Size in units of every allocated block, by its handle."""
        return dict(self._live)

    def extend(self, handle: int, units: int) -> None:
        """Make an allocated block larger by the beginning of the free block behind it."""
        size, pool = self._live.pop(handle), self._pool_of[handle]
        free = pool.take(handle + size)
        pool.put(handle + size + units, free - units)
        self.allocated_bytes -= size * UNIT_BYTES
        self.add_live(pool, handle, size + units)

    def release_cached(self) -> None:
        """Release memory that holds no live block to the driver: torch.cuda.empty_cache.

        A fixed segment is released if all of it is free; of an expandable segment, every page that is free.
        """
        while self.pending:
            self.free(self.pending.popitem()[1])
        for pool, call in self.releasable():
            self.release(pool, call)

    def releasable(self) -> list[tuple[BlockPool, DriverCall]]:
        """What `release_cached` would release now."""
        return [(pool, call) for pool in self.pools() if not pool.is_private for call in pool.releasable()]

    def release(self, pool: BlockPool, call: DriverCall) -> None:
        """Release free memory of a pool to the driver."""
        pool.release(call)
        self.driver_calls.append(call)
        self.reserved_bytes -= call.size * UNIT_BYTES

    def _new_block(self, pool: BlockPool, wanted: int) -> tuple[int, int]:
        """Reserve a block of at least `wanted` units from the driver; return its start and size.

        Raises:
            CapacityExceeded: see `allocate`.
        """
        grow = self._grow_expandable if self.expandable else self._new_segment
        collect_garbage(self)
        start = grow(pool, wanted)
        if start is None and release_oversize(self, pool, wanted):
            start = grow(pool, wanted)
        if start is None:
            self.release_cached()
            self.retries += 1
            start = grow(pool, wanted)
        if start is None:
            assert self.capacity_bytes is not None
            raise CapacityExceeded(
                f"{readable_size(wanted * UNIT_BYTES)} requested with {readable_size(self.allocated_bytes)} allocated "
                f"and {readable_size(self.reserved_bytes)} reserved of {readable_size(self.capacity_bytes)}"
            )
        return start, pool.take(start)

    def map_range(self, pool: BlockPool, start: int, size: int) -> None:
        """Map memory into addresses of an expandable segment that have none."""
        hole = next(hole for hole, room in pool.unmapped.items() if hole <= start < hole + room)
        end = hole + pool.take_unmapped(hole)
        for first, last in ((hole, start), (start + size, end)):
            if first < last:
                pool.put_unmapped(first, last - first)
        pool.put(start, size)
        self.driver_calls.append(DriverCall("segment_map", start, size))
        self.count_reserved(size)

    def _has_room(self, size: int) -> bool:
        """Whether the capacity has room for units more."""
        return self.capacity_bytes is None or self.reserved_bytes + size * UNIT_BYTES <= self.capacity_bytes

    def _new_segment(self, pool: BlockPool, wanted: int) -> int | None:
        """Reserve a fixed segment as one free block; return its start, or None if the capacity is exhausted."""
        size = self.settings.segment_units(wanted)
        if not self._has_room(size):
            return None
        start, _ = self._addresses(size, size)
        self.driver_calls.append(DriverCall("segment_alloc", start, size))
        self.count_reserved(size)
        pool.segments[start] = size
        pool.put(start, size)
        return start

    def _addresses(self, size: int, least: int) -> tuple[int, int]:
        """Return start and size of an address range: the one that the caller knows if it has at least so much room."""
        known, self.next_segment = self.next_segment, None
        if known is not None and known[1] >= least:
            return known
        start = self.next_address
        self.next_address = start + (size // LARGE_SEGMENT_UNITS + 2) * LARGE_SEGMENT_UNITS
        return start, size

    def _grow_expandable(self, pool: BlockPool, wanted: int) -> int | None:
        """Map pages at the lowest address with room, so that a free block has `wanted` units.

        Returns the start of that block, or None if the capacity is exhausted. As in PyTorch, pages that were already
        mapped for the request then stay mapped.
        """
        start = pool.lowest_room(wanted)
        if start is None:
            start = self._new_expandable_segment(pool, wanted)
        while (free := pool.free.get(start, 0)) < wanted:
            hole = start + free
            mapped = -(-min(wanted - free, pool.unmapped[hole]) // pool.page) * pool.page
            if not self._has_room(mapped):
                return None
            self.map_range(pool, hole, mapped)
        return start

    def _new_expandable_segment(self, pool: BlockPool, wanted: int) -> int:
        """Add an address range of 9/8 of the device, as PyTorch does, which leaves room for holes; return its start."""
        capacity = self.capacity_bytes
        space = UNLIMITED_SPACE_UNITS if capacity is None else capacity // UNIT_BYTES * 9 // 8
        start, size = self._addresses(-(-max(space, wanted) // pool.page) * pool.page, wanted + pool.page)
        size -= size % pool.page
        pool.segments[start] = pool.spaces[start] = size
        pool.put_unmapped(start, size)
        return start


# Two rules that release a part of the free segments before all of them are. Both are off by default, and no recording
# shows them.


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
