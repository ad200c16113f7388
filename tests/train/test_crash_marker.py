"""A run that was killed cannot speak: the next one says what can be known."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lean_finetune.train.process.crash_marker import CrashMarker, crash_marker
from tests.conftest import ROOT
from tests.processes import killed_after
from tests.test_memory_limits import GROUP_V2, member, write

ENDLESS = """
import sys, time
from pathlib import Path
from lean_finetune.train.process.crash_marker import crash_marker
with crash_marker(Path(sys.argv[1]), print, root=Path(sys.argv[2]), clock=iter(range(100)).__next__) as beats:
    beats.step_started(41)
    print("running", flush=True)
    time.sleep(600)
"""


def kills(root: Path, count: int) -> None:
    write(root, "job/step", memory__events=f"oom_kill {count}\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A file system with a group in which the kernel has ended one process, and a number of the machine's start."""
    root = member(tmp_path / "root", GROUP_V2)
    kills(root, 1)
    (root / "proc/sys/kernel/random").mkdir(parents=True)
    (root / "proc/sys/kernel/random/boot_id").write_text("first\n")
    return root


@pytest.fixture
def killed_run(tmp_path: Path, root: Path) -> Path:
    """The directory that a run left when it was killed in step 41."""
    directory = tmp_path / "running"
    command = [sys.executable, "-c", ENDLESS, str(directory), str(root)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        with killed_after(process):
            assert process.stdout.readline() == "running\n"
            assert told_by(directory, root) == [], "it still runs"
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
    return directory


def told_by(directory: Path, root: Path) -> list[str]:
    """What the next run says."""
    told: list[str] = []
    with crash_marker(directory, told.append, root=root):
        pass
    return told


def test_kill_by_the_kernel_is_reported_once_with_its_step(killed_run: Path, root: Path):
    """A run gone without a trace: the user looks for a fault of the program."""
    kills(root, 2)
    (line,) = told_by(killed_run, root)
    assert "ended at optimizer step 41 or soon after" in line
    assert "the kernel has since killed 1 process(es) of this container for lack of RAM" in line
    assert told_by(killed_run, root) == [] and list(killed_run.iterdir()) == []


def test_other_kills_are_not_reported_as_lack_of_memory(killed_run: Path, root: Path):
    """A cause made up: a kill by hand taken for one by the kernel."""
    (line,) = told_by(killed_run, root)
    assert line.endswith("it crashed or was killed, but not by the kernel for lack of RAM")


def test_restart_of_the_machine_is_reported(killed_run: Path, root: Path):
    """Counters of another start compared with those of this one."""
    (root / "proc/sys/kernel/random/boot_id").write_text("second\n")
    kills(root, 9)
    (line,) = told_by(killed_run, root)
    assert line.endswith("the machine has restarted since")


def test_cause_is_unknown_without_counters(killed_run: Path, root: Path):
    (root / "sys/fs/cgroup/job/step/memory.events").unlink()
    (line,) = told_by(killed_run, root)
    assert line.endswith("this system does not count kills for lack of memory")


def test_runs_on_other_machines_are_ignored(killed_run: Path, root: Path):
    """A scratch shared by machines: a run there told dead here."""
    (file,) = killed_run.glob("*/*.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), "host": "elsewhere"}))
    assert told_by(killed_run, root) == [] and file.exists()


@pytest.mark.parametrize("content", [b"", b'{"pid": 1', b"{}", b"\xff\0"])
def test_damaged_file_is_reported_without_traceback(tmp_path: Path, root: Path, content: bytes):
    directory = tmp_path / "running"
    (directory / "7").mkdir(parents=True)
    (directory / "7/last_step.json").write_bytes(content)
    (line,) = told_by(directory, root)
    assert line.endswith("is damaged") and list(directory.iterdir()) == []


def test_processes_with_equal_ids_use_separate_files(tmp_path: Path, root: Path):
    """In containers that share a disk and a host name: one removed the other's file, or told that it was dead."""
    told: list[str] = []
    directory = tmp_path / "running"
    with crash_marker(directory, told.append, root=root) as one:
        with crash_marker(directory, told.append, root=root) as other:
            assert one.path.exists() and other.path.exists() and one.path != other.path
        assert one.path.exists()
    assert told == [] and list(directory.iterdir()) == []


def test_failed_run_leaves_no_marker(tmp_path: Path, root: Path):
    """A fault that was told is told again as a death by the next run."""
    with pytest.raises(KeyboardInterrupt), crash_marker(tmp_path / "running", print, root=root):
        raise KeyboardInterrupt
    assert list((tmp_path / "running").iterdir()) == []


def test_writes_are_rate_limited_and_write_errors_do_not_end_a_run(tmp_path: Path, root: Path):
    """A write in every step of a fast run; hours lost for a file of 200 bytes."""
    told: list[str] = []
    now = [0.0]
    beats = CrashMarker(tmp_path, told.append, root, lambda: now[0])
    for step, seconds in ((1, 0.5), (2, 1.5), (3, 1.6)):
        now[0] = seconds
        beats.step_started(step)
    assert json.loads(beats.path.read_text())["step"] == 2 and told == []
    beats.path.unlink()
    beats.path.mkdir()
    for seconds in (3.0, 5.0):
        now[0] = seconds
        beats.step_started(9)
    assert len(told) == 1 and "cannot be written (Is a directory); training continues" in told[0]
