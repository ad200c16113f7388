"""SIGTERM and Ctrl-C to any stage but train, which has its own tests: it ends soon, says so, leaves nothing half."""

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
from tests.faults.stage_run import Ended, Fault, Runner
from tests.faults.workspaces import Finished, changes_of, check_kept_or_new, check_rerun, put_nothing, put_old
from tests.processes import killed_after

END_SECONDS = 10.0
END_CPU_SECONDS = 0.5
"""Of the process, once the user was told."""
STAGES = ("pin_data", "pin_model", "tokenize", "bucket", "estimate", "evaluate", "report")


def check_told(ended: Ended, number: int) -> None:
    """One line, the shell's code, and no traceback."""
    assert ended.status == 128 + number, f"{ended.status}: {ended.output}"
    assert [line.split(":")[0] for line in ended.faults()] == [f"stopped by {signal.Signals(number).name}"]


def end_in_the_middle(runner: Runner, finished: Finished, stage: str, place: Path, number: int, group: bool) -> None:
    """Send a signal at half of a stage's time; sooner or later where the run had ended or had not begun."""
    workspace = finished.copy(place / "work")
    instant = finished.seconds[stage] / 2
    for _ in range(8):
        old = put_old(workspace, stage)
        run = runner.start(stage, workspace)
        time.sleep(instant)
        sent = time.monotonic()
        run.send(number, to_group=group)
        ended = run.wait()
        if ended.status == -number and state(workspace, stage) == old:
            assert ended.output == ""  # As while it imports: there is nothing yet to end in order.
            instant *= 1.5
        elif ended.status == -number:  # All was done, and the process about to end.
            check_kept_or_new(workspace, stage, old, finished)
            instant /= 2
        elif ended.status == 0:
            instant /= 2
        else:
            assert time.monotonic() - sent < END_SECONDS
            check_told(ended, number)
            check_kept_or_new(workspace, stage, old, finished)
            check_rerun(runner, workspace, stage, finished)
            return
    pytest.fail(f"{stage} was never met at work")


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("stage", ["tokenize", "evaluate"])
def test_ctrl_c_ends_a_stage_with_its_workers(runner, quick, tmp_path, stage):
    """A terminal sends it to the whole group."""
    end_in_the_middle(runner, quick, stage, tmp_path, signal.SIGINT, True)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_sigterm_ends_tokenize_with_its_workers(runner, quick, tmp_path):
    """`kill` sends it to one process."""
    end_in_the_middle(runner, quick, "tokenize", tmp_path, signal.SIGTERM, False)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_ends_on_either_signal(runner, finished, tmp_path, stage, number):
    """As above, all of them; a batch system sends SIGTERM to the whole group."""
    end_in_the_middle(runner, finished, stage, tmp_path, number, number == signal.SIGTERM)


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
        check_told(ended, number)
        check_kept_or_new(workspace, "bucket", old, quick)
    check_rerun(runner, workspace, "bucket", quick)


@pytest.mark.slow
def test_stopped_training_exits_at_once(quick, tmp_path):
    """Seconds for taking torch's modules down, after the line that says it is over: a scheduler kills by then."""
    workspace = quick.copy(tmp_path / "work")
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
            told = psutil.Process(process.pid).cpu_times()
            _, status, total = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 143
    assert total.ru_utime + total.ru_stime - told.user - told.system < END_CPU_SECONDS


@pytest.mark.parametrize("room", ["evaluate"])
def test_ctrl_c_during_imports_has_no_traceback(tmp_path, room):
    """Importing takes seconds: that is when a user sees a typing error, and stops."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-m", f"stages.{room}"], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        with killed_after(process, 60):
            while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():
                assert process.poll() is None, "it ended before torch was loaded"
                time.sleep(0.005)
            process.send_signal(signal.SIGINT)
            said = process.stderr.read()
    assert process.wait() == 130
    assert said.startswith("stopped by SIGINT: ") and said.count("\n") == 1
