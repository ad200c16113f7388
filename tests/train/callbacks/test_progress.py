"""Progress in a terminal and in a log: one short line, few lines, one quantity for memory."""

import io
import re
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from cuda_memory.units import GIB
from lean_finetune.core.progress import progress_bar
from lean_finetune.train.callbacks.callback import WINDOW, ProgressBar, RunInfo, SlowSteps
from lean_finetune.train.monitor.memory_monitor import Counters

INFO = RunInfo(
    total_steps=12_000,
    first_step=0,
    parameters={"train.tokens_per_step": 65_536},
    predicted_peak_bytes=7 * GIB,
    predicted_duration="2 to 8 h by the data sheet of T4 (not measured)",
    device=torch.device("cpu"),
    show_progress=True,
    curves=[],
    directories=[],
)
ROW: dict[str, Any] = {
    "step": 0,
    "loss": 1.23456,
    "tokens": 20_000,
    "padded_tokens": 20_000,
    "seconds": 1.5,
    "alloc_retries": 0,
    "allocated_bytes": None,
    "live_bytes": 7 * GIB,
    "reserved_bytes": 8 * GIB,
    "rss_bytes": 3 * GIB,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("device", "memory"), [("cpu", "process 3/24 GiB"), ("cuda", "reserved 8/24 GiB")])
def test_a_training_bar_fits_80_columns_and_shows_one_quantity_of_memory(monkeypatch, device, memory):
    """Longer lines wrap, and a wrapped bar leaves a line behind at each update."""
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(Counters, "limit_bytes", lambda _: 24 * GIB)
    monkeypatch.setattr("lean_finetune.train.callbacks.callback.make_counters", lambda _: Counters())
    bar = ProgressBar(replace(INFO, device=torch.device(device)))
    bar.on_start()
    for step in range(3):
        bar.on_step(ROW | {"step": step})
        bar._bar.refresh()
    bar.on_end(None)
    line = stderr.getvalue().split("\r")[-1].strip()
    assert len(line) <= 80 and line.count("GiB") == 1
    assert all(part in line for part in ("3/12000", "loss 1.235", "13,333 tok/s", memory, "left")), line
    outlook = [line for line in stderr.getvalue().splitlines() if line.startswith("train: loads")]
    parts = ("7 GiB", "2 to 8 h") if device == "cuda" else ("on the CPU",)
    (line,) = outlook
    assert all(part in line for part in ("12,000 steps of up to about 65,536 tokens", *parts)), line


@pytest.mark.parametrize(("stream", "updates"), [(Terminal(), 55), (io.StringIO(), 6)], ids=["terminal", "log"])
def test_micro_batches_of_a_long_step_are_shown(monkeypatch, stream, updates):
    """Half an hour at 0 of 76 steps, which looks like a hang."""
    monkeypatch.setattr(sys, "stderr", stream)
    now = [0.0]
    monkeypatch.setattr("lean_finetune.train.callbacks.callback.time.monotonic", lambda: now[0])
    bar = ProgressBar(INFO)
    bar.on_start()
    for number in range(9):  # A short step.
        bar.on_micro_batch(number, 9)
        now[0] += 1.0
    for number in range(64):
        bar.on_micro_batch(number, 64)
        now[0] += 1.0
    bar.on_end(None)
    shown = re.findall(r"micro-batch (\d+)/(\d+)", stream.getvalue())
    assert len(shown) == updates and shown[0] == ("11", "64")


def test_a_log_has_a_line_every_ten_seconds(monkeypatch):
    """Thousands of updates in the log file of a cluster's job."""
    stream, now = io.StringIO(), [0.0]
    monkeypatch.setattr(sys, "stderr", stream)
    bar = progress_bar(total=1000, desc="work", unit=" rows")
    monkeypatch.setattr(bar, "_time", lambda: bar.start_t + now[0])
    for _ in range(1000):
        now[0] += 0.06
        bar.update()
    bar.close()
    lines = stream.getvalue().splitlines()
    assert 5 <= len(lines) <= 7 and all(line.startswith("work: ") and "\r" not in line for line in lines), lines
    assert "1000/1000" in lines[-1]


def test_slow_steps_are_reported_once(capsys):
    """A second training on the same cores: hours instead of minutes, and nothing says why."""
    callback = SlowSteps(INFO)
    callback.on_start()
    for step, seconds in enumerate([60.0] + [1.0] * 20 + [9.0] * 20):
        callback.on_step(ROW | {"step": step, "seconds": seconds})
    assert capsys.readouterr().err == "", "slower, but not ten times, and a slow first step is usual"
    for step in range(4 * WINDOW):
        callback.on_step(ROW | {"step": step, "seconds": 12.0})
    err = capsys.readouterr().err
    assert err.count("warning: ") == 1 and "steps take 12 times as long as at the start" in err
    assert "OMP_WAIT_POLICY=passive" in err
