"""Files of torch.cuda.memory._dump_snapshot are read whole, and nothing in them is trusted."""

import os
import pickle
import pickletools
import random
import resource
import struct
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lean_finetune.core.errors import UserError
from lean_finetune.core.units import MIB
from lean_finetune.memory.recording import snapshot_pickle, snapshot_values
from lean_finetune.memory.recording.contradictions import contradiction
from lean_finetune.memory.recording.snapshot_file import read_snapshot
from lean_finetune.memory.recording.snapshot_pickle import Refused, load_plain
from tests.memory.snapshots import BASE, Snapshot, frame

HEADER = b"\x80\x04"
FORWARD = frame("model.py", 7, "forward")


class Call:
    """Pickles as a call of a function."""

    def __init__(self, function: Any, *values: Any) -> None:
        self.reduced = function, values

    def __reduce__(self) -> Any:
        return self.reduced


def small_snapshot() -> Snapshot:
    """A recording that begins with one segment and one block of weights."""
    snapshot = Snapshot(recording=False)
    snapshot.reserve(0, 20 * MIB)
    snapshot.alloc(0, 5 * MIB)
    snapshot.recording = True
    snapshot.alloc(5 * MIB, 3 * MIB, FORWARD)
    snapshot.reserve(64 * MIB, 40 * MIB)
    snapshot.alloc(64 * MIB, 40 * MIB, FORWARD)
    snapshot.free(5 * MIB)
    return snapshot


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
    assert len(recording.notes) == 1 and "begin late: 1 blocks" in recording.notes[0]
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
    assert recording.notes == ("1 events were skipped, because their actions are not known: steal?[2J",)


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


MALICIOUS = {
    "call": pickle.dumps(Call(os.mkdir, "pwned"), protocol=4),
    "old call": pickle.dumps(Call(os.mkdir, "pwned"), protocol=2),
    "call by name": b"\x80\x02cos\nmkdir\n(X\x05\x00\x00\x00pwnedtR.",
    "instance": b"\x80\x02(X\x05\x00\x00\x00pwnedios\nmkdir\n.",
    "build": HEADER + b"}}b.",
    "extension": HEADER + b"\x82\x01.",
    "persistent id": HEADER + b"Ppwned\n.",
    "text that is evaluated": HEADER + b"S'pwned'\n.",
}


@pytest.mark.parametrize("name", MALICIOUS)
def test_refuses_to_execute(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.pickle").write_bytes(MALICIOUS[name])
    with pytest.raises(UserError, match="only plain snapshots are read") as error:
        read_snapshot(tmp_path / "s.pickle")
    assert "\n" not in str(error.value) and not (tmp_path / "pwned").exists()


BOMBS = {
    "announced bytes": HEADER + b"\x8e" + struct.pack("<Q", 2**46) + b".",
    "announced buffer": HEADER + b"\x96" + struct.pack("<Q", 2**46) + b".",
    "announced text": HEADER + b"X" + struct.pack("<I", 2**32 - 1) + b".",
    "announced long text": HEADER + b"\x8d" + struct.pack("<Q", 2**46) + b".",
    "announced integer": HEADER + b"\x8b" + struct.pack("<i", 2**31 - 1) + b".",
    "announced frame": HEADER + b"\x95" + struct.pack("<Q", 2**46) + b".",
    "index of the memo": HEADER + b"Nr" + struct.pack("<I", 2**32 - 1) + b".",
    "marks": HEADER + b"(" * 1_000_000 + b".",
    "copies": HEADER + b"]" + b"2" * 1_000_000 + b".",
    "numeric keys": HEADER
    + b"}("
    + b"".join(b"\x8a\x08" + struct.pack("<q", i * (2**61 - 1)) + b"N" for i in range(3)),
}


@pytest.mark.parametrize("name", BOMBS)
def test_refuses_bombs_without_memory(name):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(Refused):
        load_plain(BOMBS[name])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


def test_shared_and_circular_values_cost_nothing(tmp_path):
    """Lists of lists of the same list: a reader that walks them needs 10 ** 60 steps; one that recurses never ends."""
    levels = HEADER + b"]\x94" + b"".join(b"]\x94(" + 10 * (b"h" + bytes([n])) + b"e" for n in range(60))
    circular = HEADER + b"]\x94h\x00a."
    deep = HEADER + b"]" * 300_000 + b"a" * 299_999 + b"."
    started = time.monotonic()
    for data in (levels + b".", circular, deep):
        (tmp_path / "s.pickle").write_bytes(data)
        with pytest.raises(UserError, match="s.pickle: "):
            read_snapshot(tmp_path / "s.pickle")
    assert time.monotonic() - started < 5


def test_shared_events_are_counted(tmp_path):
    """A thousand devices that share one list of a hundred thousand events are refused before they are read."""
    content = small_snapshot().content()
    content["device_traces"] = [content["device_traces"][0] * 20_000] * 1000
    (tmp_path / "s.pickle").write_bytes(pickle.dumps(content))
    with pytest.raises(UserError, match="at most 2,000,000"):
        read_snapshot(tmp_path / "s.pickle")


def test_limits_end_the_reading(monkeypatch):
    data = pickle.dumps([["text", {}]] * 100 + [str(number) for number in range(100)])
    assert load_plain(data)
    for limit in ("MAX_OPCODES", "MAX_REFERENCES", "MAX_TEXT_BYTES"):
        with monkeypatch.context() as lower, pytest.raises(Refused):
            lower.setattr(snapshot_pickle, limit, 50)
            load_plain(data)
    monkeypatch.setattr(snapshot_pickle, "MAX_FILE_BYTES", 50)
    with pytest.raises(UserError, match="max_entries"):
        snapshot_pickle.read_plain_pickle(Path(__file__))


def test_frames_are_limited(monkeypatch, tmp_path):
    path = small_snapshot().write(tmp_path / "s.pickle")
    monkeypatch.setattr(snapshot_values, "MAX_FRAMES", 1)
    with pytest.raises(UserError, match="frames of different stacks: at most 1 are read, got 2"):
        read_snapshot(path)


def broken(change: Any) -> bytes:
    """A snapshot after a change of its dictionary."""
    content = small_snapshot().content()
    change(content)
    return pickle.dumps(content)


MALFORMED = {
    "nothing": b"",
    "no pickle": b"PK\x03\x04 a zip file, as torch.save writes",
    "a text file": b"step,allocated\n1,2\n",
    "end": pickle.dumps(small_snapshot().content())[:-50],
    "a list": pickle.dumps([1, 2]),
    "no traces": broken(lambda c: c.pop("device_traces")),
    "traces": broken(lambda c: c.update(device_traces={"a": 1})),
    "trace": broken(lambda c: c.update(device_traces=["abc"])),
    "event": broken(lambda c: c.update(device_traces=[[3]])),
    "action": broken(lambda c: c["device_traces"][0][0].update(action=7)),
    "size": broken(lambda c: c["device_traces"][0][0].update(size=-1)),
    "huge size": broken(lambda c: c["device_traces"][0][0].update(size=2**60)),
    "address": broken(lambda c: c["device_traces"][0][0].update(addr="0x7f")),
    "frames": broken(lambda c: c["device_traces"][0][0].update(frames=[[]])),
    "line": broken(lambda c: c["device_traces"][0][0]["frames"][0].update(line="seven")),
    "blocks": broken(lambda c: c["segments"][0].update(blocks=None)),
    "blocks beyond the end": broken(lambda c: c["segments"][0].update(total_size=1)),
    "pool": broken(lambda c: c["segments"][0].update(segment_pool_id=(1, "a", 3))),
    "settings": broken(lambda c: c.update(allocator_settings=[])),
    "annotations": broken(lambda c: c.update(external_annotations=[{"device": 0}])),
    "no memory": broken(lambda c: c.update(segments=[], device_traces=[[]])),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_refuses_malformed_files_in_one_line(name, tmp_path):
    (tmp_path / "s.pickle").write_bytes(MALFORMED[name])
    with pytest.raises(UserError) as error:
        read_snapshot(tmp_path / "s.pickle")
    message = str(error.value)
    assert message.startswith(f"{tmp_path / 's.pickle'}: ") and message.isprintable() and len(message) < 400


def test_names_are_printable(tmp_path):
    """File names of frames are printed: they must not control a terminal."""
    snapshot = Snapshot()
    snapshot.reserve(0, 2 * MIB)
    snapshot.alloc(0, 512, frame("\x1b]0;owned\x07.py", -1, "f\ng"))
    (recording,) = read_snapshot(snapshot.write(tmp_path / "s.pickle"))
    assert recording.stacks == ((("?]0;owned?.py", 0, "f?g"),),)


@pytest.mark.slow
def test_fuzzed_files_are_read_or_refused(tmp_path):
    """10,000 snapshots with bytes changed, cut, repeated or opcodes inserted: no other error, no growth, no hang."""
    rng = random.Random(17)
    whole = pickle.dumps(small_snapshot().content(), protocol=4)
    path = tmp_path / "s.pickle"
    opcodes = [ord(opcode.code) for opcode in pickletools.opcodes]
    before, refused, slowest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0, 0.0
    for _ in range(10_000):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 8)):
            at = rng.randrange(len(data))
            match rng.randrange(4):
                case 0:
                    data[at] = rng.randrange(256)
                case 1:
                    data[at : at + rng.randint(1, 40)] = b""
                case 2:
                    data[at:at] = data[at : at + rng.randint(1, 60)]
                case _:
                    data[at:at] = bytes([rng.choice(opcodes)])
            data = data or bytearray(whole)
        path.write_bytes(data)
        started = time.monotonic()
        try:
            read_snapshot(path)
        except UserError as error:
            refused += 1
            assert str(error).isprintable() and len(str(error)) < 600
        slowest = max(slowest, time.monotonic() - started)
    assert 5_000 < refused < 10_000 and slowest < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000, sys.platform  # KiB
