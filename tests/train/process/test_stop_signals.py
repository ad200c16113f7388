"""Signals: training stops within seconds where it can be resumed, and leaves no process running."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import current_thread

import pytest

from lean_finetune.train.monitor.memory_monitor import RunPosition
from lean_finetune.train.process.stop_signals import (
    SAME_REQUEST_SECONDS,
    Stopped,
    StopRequest,
    handle_signals,
    stopping_line,
)
from tests.small_model import CPU
from tests.train import trainer
from tests.train.interrupted import finish, small_job

END_SECONDS, START_SECONDS = 60, 200
"""Timeout of a test's waits, for a busy machine."""


def wait_for(true: Callable[[], bool], seconds: float) -> None:
    """Fail where something does not come true in time."""
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, "too late"
        time.sleep(0.02)


def test_a_signal_waits_for_the_end_of_a_batch_and_raises_outside_of_steps():
    """Weights in the middle of an update cannot be saved."""
    with pytest.raises(Stopped) as stopped:
        StopRequest().request(signal.SIGTERM)
    assert (stopped.value.name, stopped.value.exit_code) == ("SIGTERM", 143)
    stop, seen = StopRequest(), []
    with stop.deferred(), pytest.raises(Stopped):
        for number in stop.between(iter(range(5))):
            seen.append(number)
            if number == 2:
                stop.request(signal.SIGINT)
    assert seen == [0, 1, 2]


def test_handlers_are_restored_and_ignored_signals_stay_ignored():
    """`nohup` and background jobs ignore signals; and code after training has its own Ctrl-C."""
    before = signal.getsignal(signal.SIGTERM)
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stop = StopRequest()
        with handle_signals(stop), stop.deferred():
            os.kill(os.getpid(), signal.SIGHUP)
            stop.check()
            assert signal.getsignal(signal.SIGTERM) is not before
        assert signal.getsignal(signal.SIGTERM) is before
    finally:
        signal.signal(signal.SIGHUP, old)


def test_a_signal_that_waits_is_acknowledged_from_another_thread():
    """Silence during a backward pass of minutes, in which Python handles no signal."""
    stop, heard = StopRequest(), []
    with pytest.raises(SystemExit), handle_signals(stop, lambda name: heard.append((name, current_thread().name))):
        with stop.deferred():
            os.kill(os.getpid(), signal.SIGTERM)
            wait_for(lambda: bool(heard), END_SECONDS)
            os.kill(os.getpid(), signal.SIGTERM)
        stop.check()
    assert heard == [("SIGTERM", "signals")]


@pytest.mark.parametrize(
    ("phase", "processes", "after"),
    [("backward", 1, "this micro-batch"), ("heldout", 1, "the held-out losses"), ("backward", 2, "this step")],
)
def test_the_acknowledgement_says_when_training_stops(phase: str, processes: int, after: str):
    """A wrong promise: several processes stop after a step, and a checkpoint has no part of one."""
    position = RunPosition(CPU, updates_in_backward=False)
    position.phase_name = phase
    assert stopping_line("SIGINT", position, processes).startswith(
        f"train: SIGINT: stopping after {after}, with a check"
    )


def test_a_signal_becomes_the_shells_exit_code():
    """DVC takes a stage that exits with 0 for finished."""
    stop = StopRequest()
    with pytest.raises(SystemExit) as ended, handle_signals(stop), stop.deferred():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # Immediately, as `timeout` sends it: the same request.
        time.sleep(0.1)
        stop.check()
    assert ended.value.code == 143


class Trainer:
    """A training in a process forked from one with all imports."""

    def __init__(self, model: Path, directory: Path, mode: trainer.Mode):
        directory.mkdir(exist_ok=True)
        self.directory = directory
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.train.trainer"])
        self.process = context.Process(target=trainer.main, args=(model, directory, mode))
        (directory / trainer.BEGUN).unlink(missing_ok=True)
        self.process.start()

    def begun(self) -> None:
        """Return once it waits."""
        wait_for((self.directory / trainer.BEGUN).exists, START_SECONDS)

    def kill(self, number: int) -> None:
        """Send a signal."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def ended(self, seconds: float = END_SECONDS) -> int | None:
        """Wait for its exit code."""
        self.process.join(seconds)
        return self.process.exitcode

    def lines(self) -> list[str]:
        """The lines for the user."""
        file = self.directory / trainer.LINES
        return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def start(small_llama: Path, tmp_path: Path) -> Iterator[Callable[..., Trainer]]:
    """Starts trainings in one directory, and kills those that still run at the end."""
    started: list[Trainer] = []

    def make(mode: trainer.Mode) -> Trainer:
        started.append(Trainer(small_llama, tmp_path / "run", mode))
        return started[-1]

    yield make
    for each in started:
        each.process.kill()
        each.process.join()
        each.process.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.usefixtures("one_thread")
@pytest.mark.slow
def test_stopped_training_resumes_to_the_same_weights(
    start: Callable[..., Trainer], small_llama: Path, tmp_path: Path, number: signal.Signals
):
    """SIGTERM of a scheduler, Ctrl-C of a user: one line, the shell's exit code, and no finished step lost."""
    first = start("until signal")
    first.begun()
    first.kill(number)
    assert first.ended() == 128 + number
    (line,) = first.lines()
    assert line.startswith(f"train: stopped by {number.name}; the checkpoint of optimizer step 2 is kept: ")
    second = start("run")
    assert second.ended(START_SECONDS) == 0
    assert "train: resumed at optimizer step " in second.lines()[-1]
    uninterrupted = finish(small_job(small_llama, tmp_path / "tokens", lora_dropout=0.1))
    assert (tmp_path / "run" / trainer.ENDED).read_text() == uninterrupted.weights_sha256()
    assert not (tmp_path / "run/checkpoints").exists()


@pytest.mark.slow
def test_a_second_signal_ends_the_process_at_once(start: Callable[..., Trainer]):
    """A second Ctrl-C waits for a batch that takes minutes."""
    training = start("stuck")
    training.begun()
    training.kill(signal.SIGTERM)
    assert training.ended(SAME_REQUEST_SECONDS + 0.2) is None
    training.kill(signal.SIGINT)
    assert training.ended() == 128 + signal.SIGINT
    assert training.lines() == []
