"""Write errors on stdout and stderr, from a full log disk or a closed pipe, do not end a run."""

import io
import os
import sys
from typing import TextIO

import pytest
from tqdm import tqdm

from lean_finetune.train.process.stop_signals import ignore_output_errors


def full_disk() -> TextIO:
    return open("/dev/full", "w", buffering=1)


def closed_pipe() -> TextIO:
    reading, writing = os.pipe()
    os.close(reading)
    return os.fdopen(writing, "w", buffering=1)


def write_output() -> None:
    """A progress bar with lines, as training writes them."""
    with tqdm(total=3, mininterval=0) as bar:
        for number in range(3):
            bar.write(f"step {number}")
            bar.update()
    print("done", flush=True)


@pytest.mark.parametrize("log", [full_disk, closed_pipe])
def test_write_errors_on_output_are_ignored(monkeypatch: pytest.MonkeyPatch, log):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, log())
    streams = sys.stdout, sys.stderr
    for stream in streams:
        with pytest.raises(OSError):
            print("a line", file=stream)
    ignore_output_errors()
    write_output()
    monkeypatch.undo()
    for stream in streams:
        with pytest.raises(OSError):  # Its buffer cannot be written.
            stream.close()


def test_output_is_unchanged_when_writes_succeed(monkeypatch: pytest.MonkeyPatch):
    """A progress bar that tqdm no longer clears before a line."""
    outputs = []
    for prepare in (ignore_output_errors, lambda: None):
        streams = io.StringIO(), io.StringIO()
        for name, stream in zip(("stdout", "stderr"), streams, strict=True):
            monkeypatch.setattr(sys, name, stream)
        prepare()
        write_output()
        outputs.append((streams[0].getvalue(), streams[1].getvalue().count("\r")))
    assert outputs[0] == outputs[1] and outputs[0][0] == "step 0\nstep 1\nstep 2\ndone\n" and outputs[0][1] > 3


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("make_stream", [lambda: None, closed, lambda: io.TextIOWrapper(io.BytesIO(), "ascii")])
def test_a_stream_that_takes_no_text_does_not_end_a_run(monkeypatch: pytest.MonkeyPatch, make_stream):
    """`>&-` makes sys.stdout None; a library may close it; in some locales it cannot encode the letter."""
    stream = make_stream()
    monkeypatch.setattr(sys, "stdout", stream)
    ignore_output_errors()
    letter = "\N{GREEK SMALL LETTER LAMDA}"
    if stream is not None:
        with pytest.raises(ValueError):
            stream.write(letter)
    assert sys.stdout.write(letter) == 1
    print(letter, flush=True)
