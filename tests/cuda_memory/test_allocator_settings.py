"""Settings of the caching allocator, each by cases worked out by hand from PyTorch's source."""

import pytest

from cuda_memory.allocator import UNIT_BYTES, AllocatorSettings, Arena, CachingAllocator, OutOfMemory
from cuda_memory.units import MIB
from lean_finetune.core.errors import UserError


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
    with pytest.raises(OutOfMemory):
        found.allocate(50 * MIB)
    assert found.retries == 1 and found.reserved_bytes == 60 * MIB
