"""External interference with a run: its scratch directory is deleted, or a second run starts."""

import signal
import time
from pathlib import Path

import pytest

from tests.faults.outputs import state
from tests.faults.stage_run import Fault
from tests.faults.workspaces import (
    changes_of,
    check_kept_or_new,
    check_nothing_half_written,
    check_rerun,
    put_old,
)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_scratch_vanishes_at_any_moment(runner, quick, tmp_path):
    """Removed before each directory change: tokenize succeeds or fails with one line, with all tokens or none."""
    workspace = quick.copy(tmp_path / "work")
    count = len(changes_of(runner, workspace, "tokenize", tmp_path / "changes.txt"))
    refused = 0
    for number in range(count):
        old = put_old(workspace, "tokenize")
        ended = runner.run("tokenize", workspace, Fault(at_change=number, removes=workspace / "scratch"))
        if ended.status == 0:
            assert state(workspace, "tokenize") == quick.states["tokenize"]
        else:
            assert "No such file or directory" in ended.refusal()
            check_kept_or_new(workspace, "tokenize", old, quick)
            refused += 1
    assert refused > 0
    check_rerun(runner, workspace, "tokenize", quick)


@pytest.mark.parametrize("stage", ["bucket", pytest.param("pin_model", marks=pytest.mark.slow)])
def test_second_run_is_refused_while_another_writes(runner, quick, tmp_path, stage):
    """Two runs that write to one temporary directory would publish a mixture."""
    workspace = quick.copy(tmp_path / "work")
    changes = changes_of(runner, workspace, stage, tmp_path / "changes.txt")
    aside = next(place for place, change in enumerate(changes) if change.startswith("os.rename"))
    old = put_old(workspace, stage)
    first = runner.start(stage, workspace, Fault(at_change=aside, signal=signal.SIGSTOP))
    wait_until_stopped(first.pid)
    line = runner.run(stage, workspace).refusal()
    assert ": another run is writing it; wait until that ends, then rerun" in line
    assert state(workspace, stage) == old
    first.send(signal.SIGCONT, to_group=False)
    ended = first.wait()
    assert ended.status == 0, ended.output
    check_rerun(runner, workspace, stage, quick)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_second_tokenize_waits_for_the_first(runner, quick, tmp_path):
    """They share scratch/, and the second reuses the finished parts of the first."""
    workspace = quick.copy(tmp_path / "work")
    count = len(changes_of(runner, workspace, "tokenize", tmp_path / "changes.txt"))
    put_old(workspace, "tokenize")
    first = runner.start("tokenize", workspace, Fault(at_change=count // 3, signal=signal.SIGSTOP))
    wait_until_stopped(first.pid)
    second = runner.start("tokenize", workspace)
    time.sleep(quick.seconds["tokenize"])
    first.send(signal.SIGCONT, to_group=False)
    for run in (first, second):
        ended = run.wait()
        assert ended.status == 0, ended.output
    assert "waiting for it to end" in ended.output
    check_rerun(runner, workspace, "tokenize", quick)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_stage_without_a_reader_of_its_output_succeeds(runner, finished, tmp_path):
    """`dvc repro | head -1`: a broken pipe must not end a run."""
    workspace = finished.copy(tmp_path / "work")
    for stage in finished.states:
        put_old(workspace, stage)
        ended = runner.run(stage, workspace, Fault(closed_output=True))
        assert ended.status == 0 and "Traceback" not in ended.output, f"{stage}: {ended.output}"


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("stage", ["pin_data", "pin_model", "tokenize", "bucket", "estimate", "evaluate"])
@pytest.mark.parametrize("most_mib", [1, 3, 16])
def test_a_memory_limit_ends_a_stage_with_one_error(runner, finished, tmp_path, stage, most_mib):
    """`ulimit -v`: a hang, a traceback or a half-written output, wherever memory runs out."""
    workspace = finished.copy(tmp_path / "work")
    old = put_old(workspace, stage)
    ended = runner.run(stage, workspace, Fault(memory_bytes=most_mib << 20))
    if ended.status > 0:
        assert sum(line.startswith("error: ") for line in ended.output.splitlines()) == 1, ended.output
        assert "Traceback" not in ended.output, ended.output
    check_nothing_half_written(workspace, stage, old, finished)
    check_rerun(runner, workspace, stage, finished)


def wait_until_stopped(pid: int) -> None:
    """Wait until a process has received SIGSTOP from itself."""
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline
        time.sleep(0.005)
