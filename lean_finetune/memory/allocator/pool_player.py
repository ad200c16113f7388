"""One pool of the caching allocator, to which units are played: from a state it was in before, they are looked up.

The pools of small and of large blocks do not touch each other while memory lasts: the events of a unit fall into two
streams, each played to a pool of its own. So a unit whose large tensors repeat is looked up in one pool even where its
small ones do not. A state is all that decides what comes later: free blocks, segments, and where the tensors lie that
will be freed.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from lean_finetune.memory.allocator.block_pool import ADDRESS_BITS, ADDRESS_MASK, BlockPool
from lean_finetune.memory.allocator.caching_allocator import (
    LARGE_SEGMENT_UNITS,
    UNIT_BYTES,
    CachingAllocator,
    OutOfMemory,
)
from lean_finetune.memory.allocator.cut import FIRST, LATER, UPDATE
from lean_finetune.memory.allocator.pool_events import PoolEvents
from lean_finetune.memory.allocator.templates import BIRTH, Template

LARGE_ADDRESSES = (1 << (ADDRESS_BITS - 2)) // LARGE_SEGMENT_UNITS * LARGE_SEGMENT_UNITS
"""Where the addresses of large blocks begin, far above those of small ones, so that both fit into one allocator; on a
boundary of pages, by which memory is given back."""
Block = tuple[int, int]
"""Start and size of a live block, in the allocator's units."""
Left = tuple[tuple[int, Block], ...]
"""The tensors in this pool that a unit left, by their rank among all it left."""
LeftBy = Mapping[str, tuple[Left, ...]]
"""By role, what units of this step (of the update: of the last one) left."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Stream:
    """The events of a unit's tensors in one pool."""

    number: int
    """Equal for equal streams; of units of several roles only where they leave nothing here."""
    template: Template
    events: PoolEvents
    units: np.ndarray
    """Sizes of its births, in the allocator's units."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PoolState:
    """A pool as it is between two units."""

    pool: BlockPool
    left: LeftBy
    allocated_units: int
    next_segment: int

    def key(self) -> Hashable:
        """Equal for states that serve the same later units alike."""
        return self.pool.state(), tuple(self.left.items()), self.allocated_units


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """What a stream led to from a state."""

    after: int
    """Number of the state."""
    reserved_units: int
    """Then, which is the most."""
    held_units: np.ndarray
    """Of each birth, its block's size."""
    freed_units: np.ndarray
    """Of each place in the template's `foreign`, what was freed there."""


class PoolPlayer:
    """Plays streams to one pool."""

    def __init__(self, before_bytes: Sequence[int], *, expandable: bool, capacity_bytes: int | None, small: bool):
        """A pool with what exists before the first step; `small` says which one."""
        self._allocator = CachingAllocator(
            expandable=expandable, capacity_bytes=capacity_bytes, first_segment=0 if small else LARGE_ADDRESSES
        )
        self._small = small
        for size in before_bytes:
            self._allocator.allocate(size)
        self._states: list[PoolState] = []
        self._numbers: dict[Hashable, int] = {}
        self._outcomes: dict[tuple[int, int, str], Outcome | None] = {}
        self._loaded: int | None = None
        self.played_events = 0
        """Events that were played, not looked up."""
        state = PoolState(
            pool=self._pool,
            left={FIRST: (), LATER: (), UPDATE: ()},
            allocated_units=self._allocator.allocated_bytes // UNIT_BYTES,
            next_segment=self._allocator.next_segment,
        )
        self.start = self.number(state)

    @property
    def _pool(self) -> BlockPool:
        return self._allocator.pool(small=self._small)

    def state(self, number: int) -> PoolState:
        """The state of a number; not to be changed."""
        return self._states[number]

    def number(self, state: PoolState) -> int:
        """The number of a state: equal ones have one; its pool may change afterwards."""
        key = state.key()
        if key not in self._numbers:
            self._numbers[key] = len(self._states)
            self._states.append(replace(state, pool=state.pool.copy()))
        return self._numbers[key]

    def play(self, start: int, stream: Stream) -> Outcome | None:
        """What a stream leads to from a state; None where this pool alone would take more than there is."""
        # Units of other roles differ in nothing else where there is nothing that earlier ones left.
        role = stream.template.role if any(self._states[start].left.values()) else ""
        key = (start, stream.number, role)
        if key not in self._outcomes:
            try:
                self._outcomes[key] = self._play(start, stream)
            except OutOfMemory:
                self._outcomes[key] = self._loaded = None
        return self._outcomes[key]

    def _play(self, start: int, stream: Stream) -> Outcome | None:
        """Play it.

        Raises:
            OutOfMemory: there is no memory for it.
        """
        state, retries = self._states[start], self._allocator.retries
        if self._loaded != start:
            load(self._allocator, state, small=self._small)
        self._loaded = None
        foreign, left = taken(state.left, stream.template)
        blocks = self._run(stream, foreign)
        if self._allocator.retries > retries:
            return None
        held = np.array([size for _, size in blocks], dtype=np.int32)
        freed = np.array([total_units(each) for each in foreign], dtype=np.int64)
        outliving: Left = tuple((rank, blocks[birth]) for rank, birth in stream.events.outliving)
        kept_units = total_units(block for _, block in outliving)
        after = PoolState(
            pool=self._pool,
            left=with_left(left, stream.template.role, outliving),
            allocated_units=state.allocated_units + kept_units - int(freed.sum()),
            next_segment=self._allocator.next_segment,
        )
        self._loaded = known = self.number(after)
        return Outcome(after=known, reserved_units=self._pool.mapped, held_units=held, freed_units=freed)

    def _run(self, stream: Stream, foreign: Sequence[Sequence[Block]]) -> list[Block]:
        """Play the parts of a stream; returns the block of every birth.

        A turn that frees all it made, and leaves the pool as it was, is followed by others that do the same.
        """
        blocks: list[Block] = []
        units = iter(stream.units.tolist())
        actions, fits = stream.events.actions.tolist(), self._pool.fits
        for part in stream.events.parts:
            for turn in range(part.turns):
                before, born = fits.copy(), len(blocks)
                start = part.start + turn * part.size
                self._play_actions(actions[start : start + part.size], units, blocks, foreign)
                if turn + 1 < part.turns and fits == before:
                    made, more = blocks[born:], part.turns - turn - 1
                    blocks += made * more
                    deque(islice(units, len(made) * more), maxlen=0)
                    break
        return blocks

    def _play_actions(
        self, actions: Sequence[int], units: Iterator[int], blocks: list[Block], foreign: Sequence[Sequence[Block]]
    ) -> None:
        """The loop over events: takes sizes from `units`, adds to `blocks`.

        `CachingAllocator.allocate` and `free` do the same, one call for each event: a test holds this to them.
        """
        self.played_events += len(actions)
        pool = self._pool
        fits, free, free_ends, least_rest = pool.fits, pool.free, pool.free_ends, pool.least_rest
        unmapped = pool.unmapped
        for action in actions:
            if action == BIRTH:
                wanted = next(units)
                place = bisect_left(fits, wanted << ADDRESS_BITS)
                if place == len(fits):
                    start, size = self._allocator.new_block(pool, wanted)
                else:
                    fit = fits[place]
                    start, size = fit & ADDRESS_MASK, fit >> ADDRESS_BITS
                    if start + size in unmapped:  # It could grow, so another one may fit better.
                        place = pool.least_expandable(place)
                        fit = fits[place]
                        start, size = fit & ADDRESS_MASK, fit >> ADDRESS_BITS
                    del fits[place]
                    del free[start], free_ends[start + size]
                rest = size - wanted
                if rest >= least_rest:
                    behind = start + wanted
                    insort(fits, rest << ADDRESS_BITS | behind)
                    free[behind], free_ends[start + size] = rest, behind
                    size = wanted
                blocks.append((start, size))
                continue
            for start, size in (blocks[action],) if action >= 0 else foreign[-2 - action]:
                end = start + size
                before = free_ends.pop(start, None)
                if before is not None:
                    del free[before], fits[bisect_left(fits, start - before << ADDRESS_BITS | before)]
                    start = before
                after = free.pop(end, None)
                if after is not None:
                    del fits[bisect_left(fits, after << ADDRESS_BITS | end)]
                    end += after
                free[start], free_ends[end] = end - start, start
                insort(fits, end - start << ADDRESS_BITS | start)


def load(allocator: CachingAllocator, state: PoolState, *, small: bool) -> None:
    """Make a pool of an allocator be in a state."""
    allocator.load(
        state.pool,
        small=small,
        next_segment=state.next_segment,
        live=(block for units in state.left.values() for unit in units for _, block in unit),
        allocated_units=state.allocated_units,
    )


def taken(left: LeftBy, template: Template) -> tuple[list[list[Block]], LeftBy]:
    """The blocks that a unit frees of what others left, by place; and what is left besides.

    With a first micro-batch a step begins: what its forerunners left and did not free stays for ever.
    """
    if template.role == FIRST:
        left = {**left, FIRST: (), LATER: ()}
    by_role = {role: [dict(unit) for unit in reversed(units)] for role, units in left.items()}
    found = [[unit.pop(rank) for unit in by_role[role] if rank in unit] for role, rank in template.events.foreign]
    rest = {role: tuple(tuple(unit.items()) for unit in reversed(units) if unit) for role, units in by_role.items()}
    return found, rest


def with_left(left: LeftBy, role: str, blocks: Left) -> LeftBy:
    """With what a unit left; an update takes the place of the one before."""
    return {**left, role: (*(() if role == UPDATE else left[role]), *([blocks] if blocks else []))}


def total_units(blocks: Iterable[Block]) -> int:
    """Of all blocks together."""
    return sum(size for _, size in blocks)
