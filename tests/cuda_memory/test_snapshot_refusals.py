"""Snapshot files that are broken or made to do harm: nothing in them is executed, and none takes memory or time."""

import os
import pickle
import pickletools
import random
import resource
import struct
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cuda_memory import snapshot_file, snapshot_pickle
from cuda_memory.snapshot_file import read_snapshot
from cuda_memory.snapshot_pickle import Refused, load_plain
from cuda_memory.units import MIB
from lean_finetune.core.errors import UserError
from tests.cuda_memory.snapshots import Snapshot, frame, small_snapshot

HEADER = b"\x80\x04"


class Call:
    """Pickles as a call of a function."""

    def __init__(self, function: Any, *values: Any) -> None:
        self.reduced = function, values

    def __reduce__(self) -> Any:
        return self.reduced


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
    monkeypatch.setattr(snapshot_file, "MAX_FRAMES", 1)
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
