"""Files of torch.cuda.memory._dump_snapshot are read whole, and nothing in them is trusted."""

import pickle
from dataclasses import replace

import pytest

from cuda_memory.recorded_state import contradiction
from cuda_memory.snapshot_file import read_snapshot
from cuda_memory.snapshot_pickle import load_plain
from cuda_memory.units import MIB
from tests.cuda_memory.snapshots import BASE, Snapshot, frame, small_snapshot


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_reads_what_python_pickles(protocol):
    """All protocols that Python versions have written by default since 3.0."""
    content = {"texts": ["", "é", "x" * 300], "numbers": [0, 255, 65_535, -1, 2**31, 2**63, 0.5], "none": None}
    content["nested"] = [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), {"a": [{}] * 2000, "flags": [True, False]}]
    assert load_plain(pickle.dumps(content, protocol=protocol)) == content


def test_finds_the_state_at_the_beginning(tmp_path):
    """The file has the state at the end only: what was live before the first event comes from undoing all."""
    (recording,) = read_snapshot(small_snapshot().write(tmp_path / "s.pickle"))
    (segment,) = recording.segments
    assert (segment.address, segment.bytes, segment.is_small, segment.is_expandable) == (BASE, 20 * MIB, False, False)
    assert [(block.address, block.requested_bytes, block.stack) for block in segment.blocks] == [(BASE, 5 * MIB, None)]
    assert [event.action for event in recording.events] == [
        "alloc",
        "segment_alloc",
        "alloc",
        "free_requested",
        "free_completed",
    ]
    stack = recording.events[0].stack
    assert stack is not None and recording.stacks[stack] == (("model.py", 7, "forward"),)
    settings = {"expandable_segments": False, "max_split_size": -1, "roundup_power2_divisions": {"1": 0}}
    assert recording.settings == settings and recording.notes == ()


def test_undoes_events_of_expandable_segments(tmp_path):
    """Mapped pages that adjoin are one segment in the file: undoing must split and join it."""
    snapshot = Snapshot(expandable=True, recording=False)
    for start in (0, 20, 40):
        snapshot.reserve(start * MIB, 20 * MIB)
    snapshot.recording = True
    snapshot.release(20 * MIB)
    snapshot.reserve(60 * MIB, 20 * MIB)
    (recording,) = read_snapshot(snapshot.write(tmp_path / "s.pickle"))
    assert [(segment.address - BASE, segment.bytes) for segment in recording.segments] == [(0, 60 * MIB)]
    assert recording.segments[0].is_expandable and recording.notes == ()


def test_says_that_the_first_events_are_lost(tmp_path):
    (recording,) = read_snapshot(small_snapshot().write(tmp_path / "s.pickle", keep=3))
    assert [event.action for event in recording.events] == ["alloc", "free_requested", "free_completed"]
    assert sum(segment.bytes for segment in recording.segments) == 60 * MIB
    assert recording.notes == ()  # The freed block's stack is gone with its event.
    (recording,) = read_snapshot(small_snapshot().write(tmp_path / "s.pickle", keep=2))
    assert len(recording.notes) == 1 and "begin late: 1 block recorded" in recording.notes[0]
    (recording,) = read_snapshot(small_snapshot().write(tmp_path / "s.pickle", keep=0))
    assert len(recording.notes) == 1 and "no events were recorded" in recording.notes[0]


def test_says_that_events_contradict_each_other(tmp_path):
    content = small_snapshot().content()
    content["device_traces"][0].append(dict(content["device_traces"][0][0]))
    (tmp_path / "s.pickle").write_bytes(pickle.dumps(content))
    assert "contradict the memory after them: 1;" in read_snapshot(tmp_path / "s.pickle")[0].notes[0]


def test_reads_named_ranges_and_skips_unknown_actions(tmp_path):
    """Some versions of PyTorch write an event where record_function begins and ends: it is no reason for a refusal."""
    content = small_snapshot().content()
    trace = content["device_traces"][0]
    entry = {"addr": 0, "size": 0, "stream": 0, "time_us": 15}
    trace[2:2] = [
        {**entry, "action": "user_defined", "frames": [frame("Optimizer.step#AdamW.step", 0, "END")]},
        {**entry, "action": "steal\x1b[2J"},
    ]
    (tmp_path / "s.pickle").write_bytes(pickle.dumps(content))
    (recording,) = read_snapshot(tmp_path / "s.pickle")
    assert [(each.name, each.stage, each.time_us) for each in recording.annotations] == [
        ("Optimizer.step#AdamW.step", "END", 15)
    ]
    (original,) = read_snapshot(small_snapshot().write(tmp_path / "s.pickle"))
    assert recording.events == original.events and recording.stacks == original.stacks
    assert recording.notes == ("skipped 1 event of unknown actions: steal?[2J",)


@pytest.mark.parametrize(
    "settings",
    [
        {"PYTORCH_CUDA_ALLOC_CONF": "large_segment_size_mb:" + "9" * 400},
        {"max_split_size": 1},
        {"roundup_power2_divisions": {str(number): 3 for number in range(10_000)}},
    ],
)
def test_ignores_settings_that_pytorch_refuses(settings, tmp_path):
    """A number of 400 digits ended in a traceback, and other settings refused the file without its name."""
    content = small_snapshot().content() | {"allocator_settings": settings}
    (tmp_path / "s.pickle").write_bytes(pickle.dumps(content))
    (recording,) = read_snapshot(tmp_path / "s.pickle")
    assert recording.settings == {} and len(recording.notes[0]) < 400
    assert recording.notes[0].startswith("the allocator's settings are ignored")


@pytest.mark.parametrize("segment", [{"address": 2**57}, {"address": BASE + 1}, {"total_size": 20 * MIB + 1}])
def test_impossible_segments_are_not_replayed(segment, tmp_path):
    """They ended the command, which can still say what filled memory."""
    content = small_snapshot().content()
    content["segments"][0].update(segment)
    (tmp_path / "s.pickle").write_bytes(pickle.dumps(content))
    (recording,) = read_snapshot(tmp_path / "s.pickle")
    assert "the segment at" in (contradiction(replace(recording, events=())) or "")


def test_reads_every_device(tmp_path):
    first, second = small_snapshot().content(), small_snapshot().content(device=2)
    second["segments"] += first["segments"]
    second["device_traces"][0] = first["device_traces"][0]
    (tmp_path / "s.pickle").write_bytes(pickle.dumps(second))
    assert [recording.device for recording in read_snapshot(tmp_path / "s.pickle")] == [0, 2]


def test_reads_blocks_of_pytorch_2_0(tmp_path):
    """It wrote frames into the history of a block, and no addresses of blocks."""
    content = small_snapshot().content()
    for segment in content["segments"]:
        for block in segment["blocks"]:
            frames, size = block.pop("frames"), block["requested_size"]
            block["history"] = [{"addr": block.pop("address"), "real_size": size, "frames": frames}]
    content["device_traces"] = [[]]
    (tmp_path / "s.pickle").write_bytes(pickle.dumps(content))
    (recording,) = read_snapshot(tmp_path / "s.pickle")
    assert [len(segment.blocks) for segment in recording.segments] == [1, 1] and len(recording.stacks) == 1
