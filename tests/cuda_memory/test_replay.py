"""The replay of a recording: equal to the GPU where the rules hold, and every departure from them is found."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from cuda_memory.allocator import CapacityExceeded
from cuda_memory.recording import ACTIONS, Event, LiveBlock, Recording, Segment, read_table
from cuda_memory.replay import replay_exactly
from cuda_memory.units import MIB
from cuda_memory.what_if import what_if
from lean_finetune.core.errors import UserError
from tests.conftest import ROOT
from tests.cuda_memory.recorded import Recorder, random_recording

TRACES = ROOT.parent / "shared" / "facts" / "cuda_traces"


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_recording_from_the_middle_of_a_process_is_replayed_to_the_byte(seed, expandable, streams):
    """A block, a hole or a stream of the beginning lost: the next requests would reserve other segments."""
    recorder = random_recording(seed, expandable=expandable, streams=streams)
    found = replay_exactly(recorder.recording())
    assert found.differences == () and found.moved == found.unknown == found.partial_releases == 0
    assert found.allocations > 300 and found.releases > 0
    assert found.peak_reserved_bytes == found.recorded_peak_reserved_bytes
    assert recorder.allocator.reserved_bytes <= found.peak_reserved_bytes


def test_a_segment_that_the_rules_do_not_explain_is_found():
    """A replay that agrees with everything would prove nothing."""
    recording = Recording(
        name="wrong",
        events=(
            Event(action="segment_alloc", address=0, bytes=20 * MIB),
            Event(action="alloc", address=0, bytes=5 * MIB),
            Event(action="segment_alloc", address=40 * MIB, bytes=20 * MIB),
            Event(action="alloc", address=40 * MIB, bytes=5 * MIB),  # 15 MiB of the first segment are free.
        ),
    )
    found = replay_exactly(recording)
    assert [difference.event for difference in found.differences] == [3]
    assert found.peak_reserved_bytes == 20 * MIB and found.recorded_peak_reserved_bytes == 40 * MIB


def test_a_release_of_a_segment_in_use_is_found():
    events = (
        Event(action="segment_alloc", address=0, bytes=20 * MIB),
        Event(action="alloc", address=0, bytes=5 * MIB),
        Event(action="segment_free", address=0, bytes=20 * MIB),
    )
    found = replay_exactly(Recording(name="wrong", events=events))
    assert len(found.differences) == 1 and found.partial_releases == 1


def test_memory_that_ran_short_is_replayed():
    """Releases before a retry, pages mapped for a request that then failed, and the failed request itself."""
    for expandable in (False, True):
        recorder = Recorder(expandable=expandable, capacity_bytes=100 * MIB)
        recorder.begin()
        first, second = recorder.allocate(60 * MIB), recorder.allocate(10 * MIB)
        recorder.free(first)
        third = recorder.allocate(30 * MIB)
        with pytest.raises(CapacityExceeded):
            recorder.allocate(70 * MIB)
        recorder.free(second)
        recorder.free(third)
        recorder.allocate(90 * MIB)
        found = replay_exactly(recorder.recording())
        assert found.differences == () and found.partial_releases == 0
        assert len(found.reserved_bytes_at_oom) == 1 and found.reserved_bytes_at_oom[0] <= 100 * MIB
        assert found.peak_reserved_bytes == found.recorded_peak_reserved_bytes <= 100 * MIB


def test_a_recording_without_its_beginning_replays_what_it_knows():
    """Allocations in segments that nothing names must not be counted as agreeing, nor as differing."""
    recorder = random_recording(1, expandable=False, emptied=False)
    found = replay_exactly(replace(recorder.recording(), segments=()))
    assert found.unknown > 0 and found.differences == ()


def test_segments_of_both_kinds_in_one_process():
    """expandable_segments switched on while the process runs: fixed segments stay and serve requests."""
    recorder = Recorder(expandable=False)
    first = recorder.allocate(15 * MIB)
    recorder.free(first)
    recorder.allocator.expandable = True
    recorder.begin()
    recorder.allocate(12 * MIB)
    recorder.allocate(30 * MIB)
    recording = recorder.recording()
    assert [segment.is_expandable for segment in recording.segments] == [False]
    assert [event.action for event in recording.events] == ["alloc", "segment_map", "alloc"]
    assert replay_exactly(recording).differences == ()


def test_touching_segments_do_not_merge():
    """The driver often puts segments beside each other; 40 MiB in two of them serve no request of 40 MiB."""
    segments = (Segment(address=0, bytes=20 * MIB), Segment(address=20 * MIB, bytes=20 * MIB))
    events = (
        Event(action="segment_alloc", address=64 * MIB, bytes=40 * MIB),
        Event(action="alloc", address=64 * MIB, bytes=40 * MIB),
    )
    assert replay_exactly(Recording(name="test", segments=segments, events=events)).differences == ()


@pytest.mark.parametrize("path", sorted(TRACES.glob("*.csv.gz")) or [None], ids=lambda path: path and path.name)
def test_real_gpus_are_replayed_to_the_byte(path: Path | None):
    """The model of the allocator differs from a GPU."""
    if path is None:
        pytest.skip(f"no recordings of GPUs at {TRACES}")
    found = replay_exactly(read_table(path))
    assert found.differences == () and found.unknown == found.partial_releases == 0
    assert found.peak_reserved_bytes == found.recorded_peak_reserved_bytes


def test_another_thread_may_allocate_between_a_segment_and_its_allocation():
    """Where the allocator's lock is released while the driver works, events of other threads lie between the two."""
    events = (
        Event(action="segment_alloc", address=0, bytes=20 * MIB),
        Event(action="alloc", address=0, bytes=5 * MIB),
        Event(action="segment_alloc", address=64 * MIB, bytes=30 * MIB),
        Event(action="alloc", address=5 * MIB, bytes=5 * MIB),
        Event(action="alloc", address=64 * MIB, bytes=30 * MIB),
    )
    assert replay_exactly(Recording(name="test", events=events)).differences == ()
    without = replay_exactly(Recording(name="test", events=events[:-1]))
    assert [difference.event for difference in without.differences] == [2]


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ((Segment(address=0, bytes=4096), Segment(address=2048, bytes=4096)), "the segment at 2048 overlaps another"),
        ((Segment(address=0, bytes=100),), "the segment at 0 overlaps another or has no possible size"),
        ((Segment(address=1 << 60, bytes=4096),), "overlaps another or has no possible size"),
        ((Segment(address=0, bytes=512, blocks=(LiveBlock(address=0, bytes=1024, requested_bytes=9),)),), "the block"),
    ],
)
def test_a_state_that_no_allocator_can_have_is_refused_in_one_line(segments, message):
    with pytest.raises(UserError, match=message):
        replay_exactly(Recording(name="test", segments=segments))


@pytest.mark.parametrize("expandable", [False, True])
def test_a_recording_that_contradicts_itself_is_replayed_as_far_as_it_goes(expandable):
    """Files of others are damaged: events lost, doubled, moved or of another kind must not end the replay."""
    rng = random.Random(1)
    recording = random_recording(1, expandable=expandable, streams=2, before=40, after=150).recording()
    for _ in range(12):
        events = list(recording.events)
        for _ in range(6):
            place, other = rng.randrange(len(events)), rng.choice(events)
            address = rng.choice([0, other.address, other.address + 512, (1 << 64) - 512])
            size = rng.choice([0, 513, other.bytes, 1 << 45])
            events[place] = replace(
                events[place], action=rng.choice([events[place].action, *ACTIONS]), address=address, bytes=size
            )
            events.insert(place, other)
        damaged = replace(recording, events=tuple(events))
        assert replay_exactly(damaged).differences
        assert what_if(damaged).outcomes


def test_expandable_segments_lie_as_near_as_the_driver_puts_them():
    """A recording does not name their address ranges: that of the first must end where the second begins."""
    events = (
        Event(action="segment_map", address=0, bytes=20 * MIB),
        Event(action="alloc", address=0, bytes=15 * MIB),
        Event(action="segment_map", address=900 * MIB, bytes=2 * MIB),
        Event(action="alloc", address=900 * MIB, bytes=512),
        Event(action="segment_map", address=20 * MIB, bytes=40 * MIB),
        Event(action="alloc", address=15 * MIB, bytes=40 * MIB),
        Event(action="alloc", address=900 * MIB + 512, bytes=MIB),
        Event(action="segment_map", address=902 * MIB, bytes=2 * MIB),
        Event(action="alloc", address=901 * MIB + 512, bytes=MIB),
    )
    found = replay_exactly(Recording(name="test", events=events))
    assert found.differences == () and found.moved == 0


def test_a_remainder_that_no_recording_names_is_found_by_the_next_allocation_behind_it():
    """A block freed while the recording ran is known by its requested bytes; up to 1 MiB more may belong to it."""
    block = LiveBlock(address=0, bytes=5 * MIB, requested_bytes=5 * MIB)
    events = (
        Event(action="alloc", address=6 * MIB, bytes=5 * MIB),
        Event(action="segment_alloc", address=64 * MIB, bytes=20 * MIB),
        Event(action="alloc", address=64 * MIB, bytes=9 * MIB + 512),  # 9 MiB are left, not 10.
        Event(action="free_completed", address=0, bytes=5 * MIB),
        Event(action="alloc", address=0, bytes=6 * MIB),
    )
    segments = (Segment(address=0, bytes=20 * MIB, blocks=(block,)),)
    found = replay_exactly(Recording(name="test", segments=segments, events=events))
    assert found.differences == () and found.moved == 0
