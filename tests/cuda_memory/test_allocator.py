"""The caching allocator: each published rule by a case worked out by hand, and invariants of any sequence."""

import random
from itertools import pairwise

import pytest

from cuda_memory.allocator import UNIT_BYTES, AllocatorSettings, Arena, CachingAllocator, CapacityExceeded
from cuda_memory.units import GIB, MIB
from lean_finetune.core.errors import UserError


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
    with pytest.raises(
        CapacityExceeded, match=r"60 MiB requested with 20 MiB allocated and 60 MiB reserved of 100 MiB"
    ):
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
        except CapacityExceeded:
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


def allocator(capacity_mib: int | None = None, *, expandable: bool = False, **settings) -> CachingAllocator:
    capacity_bytes = None if capacity_mib is None else capacity_mib * MIB
    return CachingAllocator(
        expandable=expandable, capacity_bytes=capacity_bytes, settings=AllocatorSettings(**settings)
    )


def test_streams_share_no_memory():
    """A block freed on one stream serves no request of another; releasing the cache releases both."""
    found = allocator()
    found.free(found.allocate(30 * MIB, Arena(1)))
    found.allocate(30 * MIB, Arena(2))
    assert found.reserved_bytes == 60 * MIB
    found.release_cached()
    assert found.reserved_bytes == 30 * MIB


def test_private_pools_keep_their_segments():
    """The pool of a CUDA graph serves no other request, and torch.cuda.empty_cache does not release it."""
    found = allocator()
    found.free(found.allocate(30 * MIB, Arena(0, (0, 1))))
    found.free(found.allocate(30 * MIB))
    assert found.reserved_bytes == 60 * MIB
    found.release_cached()
    assert found.reserved_bytes == 30 * MIB


def test_blocks_that_another_stream_uses_are_freed_before_memory_runs_out():
    found = allocator(100)
    found.pending[1] = found.allocate(60 * MIB)
    found.allocate(80 * MIB)
    assert found.retries == 1 and found.pending == {} and found.reserved_bytes == 80 * MIB


def test_max_split_size_reserves_blocks_for_requests_of_their_size():
    """A large block that small requests split up is what the setting prevents."""
    found = allocator(max_split_bytes=32 * MIB)
    found.free(found.allocate(64 * MIB))
    small = found.allocate(16 * MIB)  # Not from the 64 MiB.
    assert found.reserved_bytes == 80 * MIB
    large = found.allocate(45 * MIB)  # Within 20 MiB: takes all of it.
    assert found.reserved_bytes == 80 * MIB and found.allocated_bytes == 80 * MIB
    found.free(small)
    found.free(large)
    found.allocate(44 * MIB)  # 20 MiB smaller: not from the 64 MiB.
    assert found.reserved_bytes == 124 * MIB


def test_with_max_split_size_the_largest_blocks_are_released_first_and_only_as_many_as_needed():
    found = allocator(200, max_split_bytes=32 * MIB)
    handles = [found.allocate(count * MIB) for count in (40, 50, 60, 16)]
    for handle in handles:
        found.free(handle)
    found.allocate(80 * MIB)  # 166 MiB are reserved: 60 and 50 are released, 40 and 16 stay.
    assert found.reserved_bytes == 136 * MIB and found.retries == 0


def test_garbage_collection_releases_what_was_unused_for_longest():
    found = allocator(100, garbage_collection_threshold=0.5)
    used, unused = found.allocate(30 * MIB), found.allocate(25 * MIB)
    found.free(unused)
    found.free(used)
    for _ in range(4):
        found.free(found.allocate(28 * MIB))
    found.allocate(40 * MIB)  # 55 MiB are above the threshold of 50 MiB.
    assert found.reserved_bytes == 70 * MIB and found.retries == 0


@pytest.mark.parametrize(
    ("divisions", "requested", "rounded"),
    [
        # PyTorch's documentation: 1200 with 4 divisions lies between 1024 and 2048; here in MiB.
        (4, 1200, 1280),
        (4, 1280, 1280),
        (4, 1024, 1024),
        (2, 1025, 1536),
        (8, 1025, 1152),
        (1, 1025, 1025),
    ],
)
def test_roundup_power2_divisions(divisions, requested, rounded):
    settings = AllocatorSettings(roundup_power2_divisions=(divisions,) * 16)
    assert settings.round_up(requested * MIB) == rounded * MIB // UNIT_BYTES


def test_roundup_divisions_of_an_interval():
    """Intervals begin at 1, 2, 4, … MiB; smaller requests belong to the first."""
    settings = AllocatorSettings(roundup_power2_divisions=(0, 2, *(4,) * 14))
    sizes = (MIB - 100, MIB + MIB // 8, 2 * MIB + 1, 5 * MIB, 5 * MIB + 1)
    expected = (MIB, MIB + MIB // 8, 3 * MIB, 5 * MIB, 6 * MIB)
    assert [settings.round_up(size) * UNIT_BYTES for size in sizes] == list(expected)


def test_a_small_request_is_not_rounded_to_divisions_below_512_bytes():
    assert AllocatorSettings(roundup_power2_divisions=(4,) * 16).round_up(1025) == 3


@pytest.mark.parametrize("expandable", [False, True])
def test_large_segments_have_the_size_of_the_setting(expandable):
    found = allocator(expandable=expandable, large_segment_bytes=32 * MIB)
    found.allocate(5 * MIB)
    assert found.reserved_bytes == 32 * MIB
    found.allocate(40 * MIB)
    assert found.reserved_bytes == (64 if expandable else 72) * MIB


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_split_bytes": 19 * MIB}, "max_split_size_mb: must be at least 20"),
        ({"garbage_collection_threshold": 1.0}, "garbage_collection_threshold: must be between 0 and 1"),
        ({"roundup_power2_divisions": (3,)}, "roundup_power2_divisions: every number must be a power of two"),
    ],
)
def test_what_pytorch_refuses_is_refused(settings, message):
    with pytest.raises(UserError, match=message):
        AllocatorSettings(**settings)


def test_a_garbage_collection_without_a_limit_is_refused():
    """PyTorch ignores it in silence."""
    with pytest.raises(UserError, match="has no effect without a limit"):
        allocator(garbage_collection_threshold=0.5)


def test_memory_still_runs_out_with_partial_releases():
    found = allocator(100, max_split_bytes=32 * MIB)
    found.allocate(60 * MIB)
    found.free(found.allocate(35 * MIB))
    with pytest.raises(CapacityExceeded):
        found.allocate(50 * MIB)
    assert found.retries == 1 and found.reserved_bytes == 60 * MIB
