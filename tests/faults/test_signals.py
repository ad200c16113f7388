"""SIGTERM and Ctrl-C to any stage but train: it ends soon, in one line, and leaves no half-written output."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT
from tests.faults.outputs import state
from tests.faults.stage_run import Ended, Fault
from tests.faults.workspaces import changes_of, check_kept_or_new, check_rerun, put_nothing, put_old
from tests.processes import killed_after

END_SECONDS = 10.0
END_CPU_SECONDS = 0.5
"""Limit on CPU seconds of the process after its last line."""
STAGES = ("pin_data", "pin_model", "tokenize", "bucket", "estimate", "evaluate", "report")


def check_reported(ended: Ended, number: int) -> None:
    """Assert one line, the shell's exit code for the signal, and no traceback."""
    assert ended.status == 128 + number, f"{ended.status}: {ended.output}"
    assert [line.split(":")[0] for line in ended.faults()] == [f"stopped by {signal.Signals(number).name}"]


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "number, to_group", [(signal.SIGTERM, True), (signal.SIGTERM, False), (signal.SIGINT, True)], ids=str
)
@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_ends_on_either_signal(runner, finished, tmp_path, stage, number, to_group):
    """The signal is sent after half of the stage's time; earlier or later if the run had ended or not yet started."""
    workspace = finished.copy(tmp_path / "work")
    instant = finished.seconds[stage] / 2
    for _ in range(8):
        old = put_old(workspace, stage)
        run = runner.start(stage, workspace)
        time.sleep(instant)
        sent = time.monotonic()
        run.send(number, to_group=to_group)
        ended = run.wait()
        if ended.status == -number and state(workspace, stage) == old:
            assert ended.output == ""  # During imports there is nothing to clean up.
            instant *= 1.5
        elif ended.status == -number:  # The stage was complete, and the process was exiting.
            check_kept_or_new(workspace, stage, old, finished)
            instant /= 2
        elif ended.status == 0:
            instant /= 2
        else:
            assert time.monotonic() - sent < END_SECONDS
            check_reported(ended, number)
            check_kept_or_new(workspace, stage, old, finished)
            check_rerun(runner, workspace, stage, finished)
            return
    pytest.fail(f"{stage} never received the signal during its work")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_while_outputs_are_renamed(runner, quick, tmp_path, number):
    """An exception between two renames must put the old output back, or leave the new one."""
    workspace = quick.copy(tmp_path / "work")
    changes = changes_of(runner, workspace, "bucket", tmp_path / "changes.txt")
    renames = [place for place, change in enumerate(changes) if change.startswith("os.rename")]
    assert len(renames) >= 2, "the old directory, the new one"
    for place in renames:
        old = put_old(workspace, "bucket")
        ended = runner.run("bucket", workspace, Fault(at_change=place, signal=number))
        check_reported(ended, number)
        check_kept_or_new(workspace, "bucket", old, quick)
    check_rerun(runner, workspace, "bucket", quick)


@pytest.mark.slow
def test_stopped_training_exits_soon(trained, tmp_path):
    """Seconds of torch's finalisation after the last line, in which a scheduler sends SIGKILL."""
    workspace = trained.copy(tmp_path / "work")
    put_nothing(workspace, "train")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-m", "stages.train"], cwd=workspace, env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        with killed_after(process):
            while not list(workspace.glob("scratch/train/*/step-*")):
                assert process.poll() is None, process.stderr.read()
                time.sleep(0.005)
            process.send_signal(signal.SIGTERM)
            while "stopped by SIGTERM" not in (line := process.stderr.readline()):
                assert line, "it ended without a word"
            used = psutil.Process(process.pid).cpu_times()
            _, status, total = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 143
    assert total.ru_utime + total.ru_stime - used.user - used.system < END_CPU_SECONDS


def test_ctrl_c_during_imports_has_no_traceback(tmp_path):
    """Imports take seconds, in which a user notices a typing error and presses Ctrl-C."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-m", "stages.evaluate"], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        with killed_after(process, 60):
            while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():
                assert process.poll() is None, "it ended before torch was loaded"
                time.sleep(0.005)
            process.send_signal(signal.SIGINT)
            output = process.stderr.read()
    assert process.wait() == 130
    assert output.startswith("stopped by SIGINT: ") and output.count("\n") == 1
