"""A run of hours whose log lies on a full disk, or whose reader has gone, goes on; what can be said is said."""

import io
import os
import sys
from collections.abc import Callable
from typing import TextIO

import pytest
from tqdm import tqdm

from lean_finetune.train.process.best_effort_output import ignore_output_errors


def full_disk() -> TextIO:
    """A log for which there is no room."""
    return open("/dev/full", "w", buffering=1)


def reader_gone() -> TextIO:
    """A pipe that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    return os.fdopen(writing, "w", buffering=1)


def say_all() -> None:
    """Lines beside a progress bar, as training says them."""
    with tqdm(total=3, mininterval=0) as bar:
        for number in range(3):
            bar.write(f"step {number}")
            bar.update()
    print("done", flush=True)


@pytest.mark.parametrize("log", [full_disk, reader_gone])
def test_write_errors_on_output_are_ignored(monkeypatch: pytest.MonkeyPatch, log):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, log())
    streams = sys.stdout, sys.stderr
    with pytest.raises(OSError):
        say_all()
    ignore_output_errors()
    say_all()
    monkeypatch.undo()
    for stream in streams:
        with pytest.raises(OSError):  # What it still holds can go nowhere.
            stream.close()


def test_output_is_unchanged_when_writes_succeed(monkeypatch: pytest.MonkeyPatch):
    """As without: tqdm takes the bar away before a line where both go to the terminal."""

    def said(prepare: Callable[[], None]) -> tuple[str, str]:
        out, err = io.StringIO(), io.StringIO()
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        prepare()
        say_all()
        return out.getvalue(), err.getvalue()

    (out, err), (plain_out, plain_err) = said(ignore_output_errors), said(lambda: None)
    assert out == plain_out == "step 0\nstep 1\nstep 2\ndone\n"
    assert err.count("\r") == plain_err.count("\r") > 3


def test_closed_stream_is_ignored(monkeypatch: pytest.MonkeyPatch):
    """`>&-`: Python has None there."""
    monkeypatch.setattr(sys, "stdout", None)
    ignore_output_errors()
    say_all()
    sys.stdout.flush()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    ignore_output_errors()
    print("\N{GREEK SMALL LETTER LAMDA}")
    sys.stdout.close()
    say_all()
