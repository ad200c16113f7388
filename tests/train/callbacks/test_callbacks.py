"""Callbacks of the training loop: a tracker is one class in one list."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lean_finetune.train.callbacks.callback import CALLBACKS, Callback, CurveRow
from lean_finetune.train.loop import train
from lean_finetune.train.monitor.measured_peak import make_meter
from lean_finetune.train.process.stop_signals import Stopped
from tests.small_model import CPU
from tests.train.interrupted import STEPS, Breaking, interrupt, small_job


@pytest.fixture
def events() -> Any:
    """Register a tracker for the test, and return what it receives."""
    received: list[tuple[str, Any]] = []

    class Tracker(Callback):
        def on_start(self) -> None:
            received.append(("start", self.info))

        def on_step(self, row: CurveRow) -> None:
            received.append(("step", row))

        def on_checkpoint(self, step: int) -> None:
            received.append(("checkpoint", step))

        def on_end(self, peak_bytes: int | None) -> None:
            received.append(("end", peak_bytes))

        def on_fault(self, error: BaseException) -> None:
            received.append(("fault", type(error)))

    CALLBACKS.append(Tracker)
    yield received
    CALLBACKS.remove(Tracker)


def test_registered_tracker_receives_losses_throughput_and_memory(small_llama: Path, tmp_path: Path, events):
    """A new tracker needs changes in the loop."""
    job = small_job(small_llama, tmp_path / "tokens")
    job = replace(job, settings={"train.lr": 0.01}, predicted_peak_bytes=1 << 20)
    curves = train(job, make_meter(CPU), Breaking(tmp_path / "checkpoints", every_step=True)).curves
    assert [name for name, _ in events] == ["start", *(["step", "checkpoint"] * STEPS), "end"]
    info = events[0][1]
    assert (info.total_steps, info.first_step, info.predicted_peak_bytes) == (STEPS, 0, 1 << 20)
    assert info.parameters == {"train.lr": 0.01}
    rows = [row for name, row in events if name == "step"]
    assert rows == curves and all(row["loss"] > 0 and row["tokens"] / row["seconds"] > 0 for row in rows)
    assert [row["step"] for row in rows if "heldout_loss" in row] == [1, 3, 4]
    peaks = [row["allocated_bytes"] for row in rows if row["allocated_bytes"] is not None]
    assert len(peaks) == len(job.measured_steps) and events[-1] == ("end", max(peaks))


def test_stopped_run_ends_with_a_fault_and_the_resumed_one_starts_where_it_ended(
    small_llama: Path, tmp_path: Path, events
):
    job = small_job(small_llama, tmp_path / "tokens")
    interrupt(job, tmp_path / "checkpoints", stop_after=2)
    assert events[-1] == ("fault", Stopped)
    events.clear()
    train(job, make_meter(CPU), Breaking(tmp_path / "checkpoints"))
    assert events[0][1].first_step == 2 and [row["step"] for name, row in events if name == "step"] == [2, 3, 4]
