"""The next run reports a run that was killed, as far as the system knows why."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from threading import Timer
from uuid import UUID

import pytest

from lean_finetune.core.file_locks import lock_directory, unlock_directory
from lean_finetune.train.checkpoint.scratch_dir import CrashMarker, crash_marker
from tests.conftest import ROOT
from tests.processes import killed_after
from tests.test_memory_limits import GROUP_V2, member, write

ENDLESS = """
import sys, time
from pathlib import Path
from lean_finetune.train.checkpoint.scratch_dir import crash_marker
with crash_marker(Path(sys.argv[1]), print, root=Path(sys.argv[2]), clock=iter(range(100)).__next__) as marker:
    marker.step_started(41)
    print("running", flush=True)
    time.sleep(600)
"""


def write_kills(root: Path, count: int) -> None:
    write(root, "job/step", memory__events=f"oom_kill {count}\n")


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed in step 41: its directory `running`, and its file system `root`.

    `root` has a group in which the kernel has ended one process, and a number of the machine's start.
    """
    parent = tmp_path_factory.mktemp("killed")
    root, directory = member(parent / "root", GROUP_V2), parent / "running"
    write_kills(root, 1)
    (root / "proc/sys/kernel/random").mkdir(parents=True)
    (root / "proc/sys/kernel/random/boot_id").write_text("first\n")
    command = [sys.executable, "-c", ENDLESS, str(directory), str(root)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        with killed_after(process):
            assert process.stdout.readline() == "running\n"
            assert report(directory, root) == [], "it still runs"
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
    return parent


@pytest.fixture
def root(killed: Path, tmp_path: Path) -> Path:
    """A copy of the killed run's file system."""
    return shutil.copytree(killed / "root", tmp_path / "root")


@pytest.fixture
def killed_run(killed: Path, tmp_path: Path) -> Path:
    """A copy of the directory that the killed run left."""
    return shutil.copytree(killed / "running", tmp_path / "running")


def report(directory: Path, root: Path) -> list[str]:
    """The lines of the next run."""
    lines: list[str] = []
    with crash_marker(directory, lines.append, root=root):
        pass
    return lines


def test_kill_by_the_kernel_is_reported_once_with_its_step(killed_run: Path, root: Path):
    """A run that disappears: the user looks for a fault of the program."""
    write_kills(root, 2)
    (line,) = report(killed_run, root)
    assert "ended at optimizer step 41 or soon after" in line
    assert "the kernel has since killed 1 process(es) of this container for lack of RAM" in line
    assert report(killed_run, root) == [] and list(killed_run.iterdir()) == []


def test_kernel_is_not_blamed_without_evidence(killed_run: Path, root: Path):
    """A kill by hand, a restart or a system without counters reported as lack of memory."""
    (file,) = killed_run.glob("*/*.json")
    content = json.loads(file.read_text())

    def report_again() -> str:
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(content))
        (line,) = report(killed_run, root)
        return line

    assert report_again().endswith("it crashed or was killed, but not by the kernel for lack of RAM")
    (root / "sys/fs/cgroup/job/step/memory.events").unlink()
    assert report_again().endswith("this system does not count kills for lack of memory")
    (root / "proc/sys/kernel/random/boot_id").write_text("second\n")
    write_kills(root, 9)
    assert report_again().endswith("the machine has restarted since")


def test_runs_on_other_machines_are_ignored(killed_run: Path, root: Path):
    """On a scratch directory that machines share, a run on another one reported as dead."""
    (file,) = killed_run.glob("*/*.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), "host": "elsewhere"}))
    assert report(killed_run, root) == [] and file.exists()


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\0"])
def test_damaged_file_is_reported_without_traceback(tmp_path: Path, root: Path, content: bytes):
    directory = tmp_path / "running"
    (directory / "7").mkdir(parents=True)
    (directory / "7/last_step.json").write_bytes(content)
    (line,) = report(directory, root)
    assert line.endswith("is damaged") and list(directory.iterdir()) == []


def test_processes_with_equal_ids_use_separate_files(tmp_path: Path, root: Path):
    """Containers that share a disk and a host name: one removes the other's file, or reports it as dead."""
    lines: list[str] = []
    directory = tmp_path / "running"
    with crash_marker(directory, lines.append, root=root) as one:
        with pytest.raises(KeyboardInterrupt), crash_marker(directory, lines.append, root=root) as other:
            assert one.path.exists() and other.path.exists() and one.path != other.path
            raise KeyboardInterrupt  # Reported by its own error, so not by the next run.
        assert one.path.exists()
    assert lines == [] and list(directory.iterdir()) == []


def test_writes_are_rate_limited_and_write_errors_do_not_end_a_run(tmp_path: Path, root: Path):
    """A write in every step of a fast run; hours lost for a file of 200 bytes."""
    lines: list[str] = []
    now = [0.0]
    marker = CrashMarker(tmp_path, lines.append, root, lambda: now[0])
    for step, seconds in ((1, 0.5), (2, 1.5), (3, 1.6)):
        now[0] = seconds
        marker.step_started(step)
    assert json.loads(marker.path.read_text())["step"] == 2 and lines == []
    marker.path.unlink()
    marker.path.mkdir()
    for seconds in (3.0, 5.0):
        now[0] = seconds
        marker.step_started(9)
    assert len(lines) == 1 and "cannot be written (Is a directory); training continues" in lines[0]


def test_a_process_waits_while_another_one_looks_into_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The first process of a run reads what it finds, and may find a directory that is not locked yet."""
    monkeypatch.setattr("lean_finetune.train.checkpoint.scratch_dir.uuid4", lambda: UUID(int=0))
    own = tmp_path / "00000000"
    reader = lock_directory(own)
    assert reader is not None
    release = Timer(0.05, unlock_directory, (own, reader))
    release.start()
    with crash_marker(tmp_path, print, reports=False) as marker:
        assert marker.path.parent == own
    release.join()
