"""Write errors on stdout and stderr, from a full log disk or a closed pipe, do not end a run."""

import io
import os
import sys
from collections.abc import Callable
from typing import TextIO

import pytest
from tqdm import tqdm

from lean_finetune.train.process.best_effort_output import ignore_output_errors


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
    with pytest.raises(OSError):
        write_output()
    ignore_output_errors()
    write_output()
    monkeypatch.undo()
    for stream in streams:
        with pytest.raises(OSError):  # Its buffer cannot be written.
            stream.close()


def test_output_is_unchanged_when_writes_succeed(monkeypatch: pytest.MonkeyPatch):
    def output_with(prepare: Callable[[], None]) -> tuple[str, str]:
        out, err = io.StringIO(), io.StringIO()
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        prepare()
        write_output()
        return out.getvalue(), err.getvalue()

    (out, err), (plain_out, plain_err) = output_with(ignore_output_errors), output_with(lambda: None)
    assert out == plain_out == "step 0\nstep 1\nstep 2\ndone\n"
    assert err.count("\r") == plain_err.count("\r") > 3


def test_closed_stream_is_ignored(monkeypatch: pytest.MonkeyPatch):
    """`>&-`: Python has None there."""
    monkeypatch.setattr(sys, "stdout", None)
    ignore_output_errors()
    write_output()
    sys.stdout.flush()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    ignore_output_errors()
    print("\N{GREEK SMALL LETTER LAMDA}")
    sys.stdout.close()
    write_output()
