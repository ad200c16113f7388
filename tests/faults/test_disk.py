"""A disk that is full or read-only, in any stage: one line, exit code 1, and earlier outputs are unchanged."""

import errno
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest

from lean_finetune.core.atomic_files import FIGURES, read_sealed, write_sealed
from tests.conftest import ROOT
from tests.faults.conftest import NAMESPACE
from tests.faults.outputs import declared, digest, state
from tests.faults.stage_run import Fault, Runner
from tests.faults.workspaces import Finished, check_kept_or_new, check_rerun, put_nothing, put_old
from tests.kit.write_params import write_params
from tests.processes import run_bounded, wait_for

STAGES = ("pin_code", "pin_data", "pin_model", "tokenize", "bucket", "estimate", "train", "evaluate", "report")
LINKS = "locks/watched-files"
"""Links to data files, which pin_data writes."""
DISK_BYTES = 64 << 20


def fill(disk: Path, free_bytes: int) -> None:
    """Fill a disk up to this much free space."""
    statistics = os.statvfs(disk)
    spare = statistics.f_bavail * statistics.f_frsize - free_bytes
    with open(disk / "ballast", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, spare)


def written_bytes(finished: Finished, stage: str) -> int:
    """Return the size of a stage's outputs."""
    paths = [finished.root / path for path in declared(stage)]
    files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("*"))]
    return sum(file.stat().st_size for file in files)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("share", [0.0, 0.6])
@pytest.mark.parametrize("stage", STAGES)
def test_a_disk_that_fills_up(mounting, finished, tmp_path, stage, share):
    """The disk is full at the first byte, or after a share of the stage's outputs."""
    if 0 < written_bytes(finished, stage) * share <= 8192:
        pytest.skip("its outputs take less than two pages, the least that a disk has room for")
    workspace = tmp_path / "work"
    workspace.mkdir()
    mounting.mount(workspace, DISK_BYTES)
    seen = mounting.seen(workspace)
    finished.copy(seen)
    old = put_old(seen, stage)
    fill(seen, int(written_bytes(finished, stage) * share))
    line = mounting.run(stage, workspace).refusal()
    found = "No space left on device" in line or (stage == "train" and "too little free space" in line)
    assert found and "free space, then rerun" in line
    check_kept_or_new(seen, stage, old, finished)
    (seen / "ballast").unlink()
    ended = mounting.run(stage, workspace)
    assert ended.status == 0, ended.output


def mount_full_disk(mounting: Runner, workspace: Path, name: str) -> Path:
    """Move a directory of a workspace to a full disk; return the workspace as its runs see it."""
    disk, content = workspace / name, workspace.with_name("content")
    disk.mkdir(exist_ok=True)
    shutil.copytree(disk, content, symlinks=True)
    mounting.mount(disk, DISK_BYTES)
    seen = mounting.seen(workspace)
    shutil.copytree(content, seen / name, symlinks=True, dirs_exist_ok=True)
    fill(seen / name, 0)
    return seen


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("stage, full", [("tokenize", "scratch"), ("tokenize", "data"), ("evaluate", "metrics")])
def test_one_of_several_disks_is_full(mounting, trained, tmp_path, stage, full):
    """Unfinished work, outputs and metrics may be on different disks."""
    workspace = trained.copy(tmp_path / "work")
    old = put_old(workspace, stage)
    seen = mount_full_disk(mounting, workspace, full)
    line = mounting.run(stage, workspace).refusal()
    assert line.startswith(full) and "No space left on device" in line
    check_kept_or_new(seen, stage, old, trained)
    (seen / full / "ballast").unlink()
    ended = mounting.run(stage, workspace)
    assert ended.status == 0, ended.output


@pytest.mark.multiprocess
@pytest.mark.slow
def test_full_disk_when_training_saves(mounting, trained, tmp_path):
    """Found before the first step; without that check, the last checkpoint remains and only publishing is repeated."""
    workspace = trained.copy(tmp_path / "work")
    put_nothing(workspace, "train")
    seen = mount_full_disk(mounting, workspace, "data")
    line = mounting.run("train", workspace).refusal()
    assert line.startswith("data/tuned: the disk has too little free space for the end of training: ")
    assert line.endswith("; no checkpoint was made: the same command starts at the first step")
    assert not list(seen.glob("scratch/train/*/*step-*"))
    verdict = seen / "data/estimate/verdict.json"
    (seen / "data/ballast").unlink()
    write_sealed(verdict, {"enforce": False, "refusal": None})
    fill(seen / "data", 0)
    line = mounting.run("train", workspace).refusal()
    assert line.startswith("data/tuned: cannot be written (No space left on device"), line
    assert re.search(r"; the checkpoint of optimizer step (\d+) is kept: the same command resumes from it$", line)
    (seen / "data/ballast").unlink()
    ended = mounting.run("train", workspace)
    assert ended.status == 0, ended.output
    resumed = re.search(r"train: resumed at optimizer step (\d+) of (\d+) ", ended.output)
    assert resumed is not None and resumed[1] == resumed[2], ended.output
    assert state(seen, "train") == trained.states["train"]
    assert not list(seen.glob("scratch/train/*/*step-*"))


STATE_BYTES = 6 << 20
"""About the optimizer state of all weights."""
ON_DISK = {"train.offload": "optimizer", "train.offload_to": "disk"}


@pytest.fixture
def small_disk(tmp_path: Path) -> Path:
    """A file with an ext4 file system, which has the direct access that a tmpfs lacks."""
    image = tmp_path / "disk.img"
    with open(image, "wb") as file:
        file.truncate(DISK_BYTES)
    (tmp_path / "tried").mkdir()
    tried = 'mkfs.ext4 -q -m 0 "$0" && mount -o loop "$0" "$1"'  # -m 0: no blocks are reserved for root.
    made = run_bounded([*NAMESPACE, "sh", "-c", tried, image, tmp_path / "tried"])
    if made.returncode:
        pytest.skip(f"no process may mount a file with a file system here: {made.stderr.strip()}")
    return image


def checkpoints(root: Path) -> dict[str, str]:
    """Hashes of the finished checkpoints, by name."""
    return {path.name: digest(path) for path in root.glob("scratch/train/*/step-*")}


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("predicted", [True, False])
def test_optimizer_state_that_its_disk_has_no_room_for(mounting, small_disk, quick, tmp_path, predicted):
    """Found before the first step, by the prediction or by the disk; the checkpoint there remains and is used later."""
    workspace, alone = quick.copy(tmp_path / "work"), quick.copy(tmp_path / "alone")
    for directory, moved in ((workspace, ON_DISK), (alone, {})):
        write_params(directory, {"train.method": "full", "train.lr": 1e-3, **moved}, directory / "params.yaml")
    assert mounting.run("train", alone).status == 0
    shutil.rmtree(workspace / "scratch", ignore_errors=True)
    (workspace / "scratch").mkdir()
    mounting.mount(workspace / "scratch", image=small_disk)
    seen = mounting.seen(workspace)
    estimate = read_sealed(seen / "data/estimate" / FIGURES)
    write_sealed(seen / "data/estimate" / FIGURES, {**estimate, "disk_bytes_predicted": predicted * STATE_BYTES})

    run = mounting.start("train", workspace)
    wait_for(lambda: checkpoints(seen))
    run.send(signal.SIGKILL, to_group=True)
    run.wait()
    fill(seen / "scratch", STATE_BYTES // 2)
    before = checkpoints(seen)
    line = mounting.run("train", workspace).refusal()
    assert re.match(r"train\.offload_to: disk (needs|must have) room for .*free some, (or )?use ", line), line
    step = max(int(name.removeprefix("step-")) for name in before)
    assert line.endswith(f"; the checkpoint of optimizer step {step} is kept: the same command resumes from it"), line
    assert checkpoints(seen) == before and not (seen / "data/tuned").exists()
    (seen / "scratch/ballast").unlink()
    ended = mounting.run("train", workspace)
    assert ended.status == 0 and "train: resumed at optimizer step " in ended.output, ended.output
    assert digest(seen / "data/tuned") == digest(alone / "data/tuned")


@pytest.mark.slow
def test_full_disk_under_the_log_does_not_end_training(trained, tmp_path):
    """Only the printed output is lost; the files are complete."""
    workspace = trained.copy(tmp_path / "work")
    put_nothing(workspace, "train")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = ["sh", "-c", 'exec "$0" -m stages.train >/dev/full 2>&1', sys.executable]
    assert run_bounded(command, cwd=workspace, env=environment).returncode == 0
    assert state(workspace, "train") == trained.states["train"]


LIMITS = {"pin_data": 400, "pin_model": 400, "tokenize": 4096, "bucket": 1024, "evaluate": 512}
"""File size limit in bytes, below the size of the stage's largest file."""


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("stage, limit", LIMITS.items())
def test_file_size_limit(runner, trained, tmp_path, stage, limit):
    """A file size limit simulates a full disk without the right to mount."""
    workspace = trained.copy(tmp_path / "work")
    old = put_old(workspace, stage)
    line = runner.run(stage, workspace, Fault(file_bytes=limit)).refusal()
    assert os.strerror(errno.EFBIG) in line and "free space, then rerun" in line
    check_kept_or_new(workspace, stage, old, trained)


@pytest.mark.slow
@pytest.mark.parametrize(
    "stage, closed", [*((stage, None) for stage in STAGES), ("tokenize", "scratch"), ("pin_data", LINKS)]
)
def test_a_directory_without_write_permission(runner, finished, tmp_path, stage, closed):
    """The directory of the first output, or another one that the stage writes to; root drops its privilege first."""
    workspace = finished.copy(tmp_path / "work")
    old = put_old(workspace, stage)
    closed = closed or Path(declared(stage)[0]).parent.as_posix()
    (workspace / closed).mkdir(exist_ok=True)
    if closed == LINKS:
        (workspace / LINKS / "of-an-earlier-source").symlink_to("0")
    (workspace / closed).chmod(0o555)
    try:
        line = runner.run(stage, workspace, Fault(unprivileged=True)).refusal()
    finally:
        (workspace / closed).chmod(0o755)
    assert line.startswith(closed) and "Permission denied" in line and "change permissions" in line
    check_kept_or_new(workspace, stage, old, finished)
    check_rerun(runner, workspace, stage, finished)
