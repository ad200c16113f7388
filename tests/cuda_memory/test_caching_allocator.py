"""The caching allocator: each published rule by a case worked out by hand, and invariants of any sequence."""

import random
from itertools import pairwise

import pytest

from cuda_memory.allocator import UNIT_BYTES, CachingAllocator, OutOfMemory
from cuda_memory.units import GIB, MIB


@pytest.mark.parametrize(
    ("expandable", "requested", "allocated", "reserved"),
    [
        (False, 1, 512, 2 * MIB),
        (False, 513, 1024, 2 * MIB),
        (False, MIB, MIB, 2 * MIB),
        (False, MIB + 1, MIB + 512, 20 * MIB),
        (False, 10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        # From 10 MiB on rounded to 2 MiB; a rest of 1 MiB or less is not split off and counts as allocated.
        (False, 10 * MIB, 10 * MIB, 10 * MIB),
        (False, 11 * MIB, 12 * MIB, 12 * MIB),
        (False, 11 * MIB - 512, 11 * MIB - 512, 12 * MIB),
        (True, 1, 512, 2 * MIB),
        (True, MIB + 1, MIB + 512, 20 * MIB),
        (True, 11 * MIB, 11 * MIB, 20 * MIB),
        (True, GIB, GIB, 1040 * MIB),
    ],
)
def test_a_first_request(expandable, requested, allocated, reserved):
    """A size class, a rounding, a page or the rule of splitting wrong."""
    allocator = CachingAllocator(expandable=expandable, capacity_bytes=None)
    allocator.allocate(requested)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (allocated, reserved)


Step = float | str


def play(allocator: CachingAllocator, *steps: Step) -> None:
    """Allocate sizes in MiB; `-n` frees the allocation number n, and `release` all cached memory."""
    handles: list[int] = []
    for step in steps:
        if step == "release":
            allocator.release_cached()
        elif isinstance(step, str):
            allocator.free(handles[int(step[1:])])
        else:
            handles.append(allocator.allocate(int(step * MIB)))


FIXED: dict[str, tuple[tuple[Step, ...], float, int]] = {
    "small requests share a segment": ((0.5,) * 4, 2, 2),
    "a full segment is followed by another": ((0.5,) * 5, 2.5, 4),
    "small and large blocks never share": ((64, "-0", 1), 1, 66),
    "the smallest block that is large enough is taken": ((40, 30, 20, "-0", "-1", "-2", 20, 30, 40), 90, 90),
    "free segments never merge": ((20, 20, "-0", "-1", 40), 40, 80),
    "free neighbours merge on both sides": ((6, 6, 6, "-0", "-2", "-1", 9, 9), 18, 20),
    "free neighbours merge in any order": ((6, 6, 6, "-2", "-1", "-0", 9, 9), 18, 20),
    "a remainder of 1 MiB is not split off": ((20, "-0", 19), 20, 20),
    "a larger remainder is split off": ((20, "-0", 18.75), 18.75, 20),
}
EXPANDABLE: dict[str, tuple[tuple[Step, ...], float, int]] = {
    "a segment grows from its free tail": ((20, "-0", 40, "-1", 60, "-2", 100, "-3"), 0, 100),
    "one more page is mapped at the tail": ((100, "-0", 30, 90), 120, 120),
    # The hole of 24 MiB is taken, not the tail of 14, which can grow: no hole is left for 24.
    "a block that can grow counts as large as it can become": ((24, 2, 14, "-0", "-2", 13, 24), 39, 60),
    "a page with a live block is not released": ((30, 25, 45, "-1", "release"), 75, 100),
    "free pages are released": ((30, 25, 45, "-1", "release", "-2", "release"), 30, 40),
    "released pages are mapped again": ((40, 20, "-0", "release", 30), 50, 60),
}


@pytest.mark.parametrize(
    ("expandable", "case"), [*((False, case) for case in FIXED), *((True, case) for case in EXPANDABLE)]
)
def test_the_rules_for_blocks_and_segments(expandable, case):
    """A rule of PyTorch's allocator broken: memory reserved that is not, or the reverse."""
    steps, allocated, reserved = (EXPANDABLE if expandable else FIXED)[case]
    allocator = CachingAllocator(expandable=expandable, capacity_bytes=None)
    play(allocator, *steps)
    assert (allocator.allocated_bytes / MIB, allocator.reserved_bytes / MIB) == (allocated, reserved)


@pytest.mark.parametrize(
    ("expandable", "steps", "reserved", "retries"),
    [
        (False, (60, "-0", 80), 80, 1),
        # Free pages move to where they are needed, without a retry.
        (True, (60, "-0", 20, 60), 80, 0),
        # 40 MiB of free pages before the middle block are released; 20 MiB stay.
        (True, (50, 10, "-0", 80), 100, 1),
    ],
)
def test_at_the_capacity_cached_memory_is_released_and_the_request_retried(expandable, steps, reserved, retries):
    """Cached blocks not released although the request needs their memory; a retry that is not counted."""
    allocator = CachingAllocator(expandable=expandable, capacity_bytes=100 * MIB)
    play(allocator, *steps)
    assert (allocator.reserved_bytes, allocator.retries) == (reserved * MIB, retries)
    assert allocator.peak_reserved_bytes <= 100 * MIB


def test_a_segment_with_a_live_block_is_not_released():
    """Fragmentation overlooked: 40 MiB are free inside a segment, and the request still fails."""
    allocator = CachingAllocator(expandable=False, capacity_bytes=100 * MIB)
    play(allocator, 60, "-0", 20)
    with pytest.raises(OutOfMemory, match=r"60 MiB requested with 20 MiB allocated and 60 MiB reserved of 100 MiB"):
        allocator.allocate(60 * MIB)
    assert allocator.retries == 1 and allocator.allocated_bytes == 20 * MIB


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_invariants_after_every_event_of_a_random_sequence(expandable, seed):
    """Bytes lost or counted twice, or live blocks that overlap."""
    rng = random.Random(seed)
    capacity = 512 * MIB
    allocator = CachingAllocator(expandable=expandable, capacity_bytes=capacity)
    live: list[int] = []
    refused = 0
    for _ in range(1500):
        if live and rng.random() < 0.48:
            allocator.free(live.pop(rng.randrange(len(live))))
            continue
        size = rng.choice([rng.randint(1, 2 * MIB), rng.randint(1, 90 * MIB), rng.choice([MIB, 10 * MIB, 20 * MIB])])
        try:
            live.append(allocator.allocate(size))
        except OutOfMemory:
            refused += 1
        else:
            assert allocator._live[live[-1]] * UNIT_BYTES >= size
        blocks = sorted(allocator._live.items())  # Addresses and sizes in units.
        assert all(a + n <= b for (a, n), (b, _) in pairwise(blocks))
        assert allocator.allocated_bytes == sum(n for _, n in blocks) * UNIT_BYTES
        assert allocator.allocated_bytes <= allocator.reserved_bytes <= capacity
    assert refused and allocator.retries >= refused
    for handle in live:
        allocator.free(handle)
    allocator.release_cached()
    assert allocator.allocated_bytes == allocator.reserved_bytes == 0
