"""Recordings as tables: what a row means, and the line of a row that means nothing."""

import gzip
import os

import pytest

from cuda_memory import recording
from cuda_memory.recording import Event, Frame, LiveBlock, Segment, read_table
from lean_finetune.core.errors import UserError

TABLE = """event,address,bytes,where
segment,4096,2097152,
segment,0,2048,
block,4608,1024,
alloc,5632,700,a/b.py:7:forward < c.py:12:<module>
free_completed,5632,1024,
alloc,5632,700,a/b.py:7:forward < c.py:12:<module>
"""


@pytest.mark.parametrize("compressed", [False, True])
def test_a_table_is_read_into_segments_blocks_events_and_stacks(tmp_path, compressed):
    """A row dropped, out of order or in the wrong segment would change the replay."""
    path = tmp_path / ("r.csv.gz" if compressed else "r.csv")
    path.write_bytes(gzip.compress(TABLE.encode()) if compressed else TABLE.encode())
    recording = read_table(path)
    assert recording.name == path.name
    assert recording.segments == (
        Segment(address=0, bytes=2048),
        Segment(address=4096, bytes=2097152, blocks=(LiveBlock(address=4608, bytes=1024, requested_bytes=1024),)),
    )
    assert recording.stacks == ((Frame("a/b.py", 7, "forward"), Frame("c.py", 12, "<module>")),)
    alloc = Event(action="alloc", address=5632, bytes=700, stack=0)
    assert recording.events == (alloc, Event(action="free_completed", address=5632, bytes=1024), alloc)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("event,address\n", ":1: the columns must be event,address,bytes,where"),
        ("event,address,bytes,where\nalloc,x,1,\n", ":2: not a row of a recording .address must be a whole number"),
        ("event,address,bytes,where\nalloc,1\n", ":2: not a row of a recording .bytes must be a whole number"),
        ("event,address,bytes,where\nalloc,1,1,\nalloc,1,1,here\n", ":3: .* .where must be file:line:function"),
        ("event,address,bytes,where\nalloc,1,1,a.py:x:f\n", ":2: .* .where must be file:line:function"),
        ("event,address,bytes,where\nalloc,1,-1,\n", ":2: not a row of a recording"),
        (f"event,address,bytes,where\nalloc,1,{2**70},\n", ":2: not a row of a recording"),
        ("event,address,bytes,where\nmalloc,1,1,\n", ":2: unknown event 'malloc'"),
        ("event,address,bytes,where\nsegment,0,512,\nblock,512,512,\n", "the block at 512 is in no segment"),
    ],
)
def test_a_table_with_a_fault_is_refused_by_its_line(tmp_path, lines, message):
    """A traceback, or a recording that is silently incomplete."""
    path = tmp_path / "r.csv"
    path.write_text(lines)
    with pytest.raises(UserError, match=message):
        read_table(path)


@pytest.mark.parametrize(
    "content",
    [None, b"no gzip", gzip.compress(TABLE.encode())[:60], b"\x1f\x8b\x08" + b"x" * 60],
    ids=["missing", "no gzip", "incomplete", "damaged"],
)
def test_a_file_that_cannot_be_read_is_refused_in_one_line(tmp_path, content):
    """A missing or damaged file ended in a traceback."""
    path = tmp_path / "r.csv.gz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match="cannot be read as a table"):
        read_table(path)


def test_rows_are_limited(tmp_path, monkeypatch):
    """A small compressed file may have billions of rows."""
    monkeypatch.setattr(recording, "MAX_EVENTS", 3)
    (tmp_path / "r.csv").write_text(TABLE)
    with pytest.raises(UserError, match=":5: at most 3 rows"):
        read_table(tmp_path / "r.csv")


def test_sizes_are_limited(tmp_path, monkeypatch):
    """A small compressed file may have lines of gigabytes, or stacks that fill memory."""
    path = tmp_path / "r.csv.gz"
    path.write_bytes(gzip.compress(TABLE.encode()))
    for limit, most, message in (
        ("MAX_LINE_BYTES", 30, "at most 30 B a line"),
        ("MAX_TABLE_BYTES", 100, "100 B in all lines"),
        ("MAX_STACK_FRAMES", 1, ":5: .* at most 1 frames"),
        ("MAX_FRAMES", 1, ":5: .* all different ones 1"),
    ):
        with monkeypatch.context() as lower, pytest.raises(UserError, match=message):
            lower.setattr(recording, limit, most)
            read_table(path)


def test_what_is_no_regular_file_is_refused(tmp_path):
    """Opening a named pipe waits for its writer, and a device may never end."""
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "zero.csv").symlink_to("/dev/zero")
    (tmp_path / "folder.csv").mkdir()
    for path in tmp_path.iterdir():
        with pytest.raises(UserError, match="no regular file"):
            read_table(path)
