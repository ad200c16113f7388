"""Limits of files, disks and memory in training, merges, exports and with preference pairs: one line, nothing lost."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.outputs import digest
from tests.faults.stage_run import Ended, Fault, Runner
from tests.faults.test_disk import DISK_BYTES, fill
from tests.faults.workspaces import (
    Finished,
    check_kept_or_new,
    check_nothing_half_written,
    check_rerun,
    put_nothing,
    put_old,
)
from tests.kit.write_params import write_params

EXPORT = "lean_finetune.commands.export:export"
OUT = ("out", "--model", "data/tuned", "--bits", "16")
GROUPS = Path("/sys/fs/cgroup/memory")
"""Of control groups of version 1, where a test may make some."""


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Path]:
    """A control group of its own with a memory limit, which a test sets."""
    path = GROUPS / f"lean-finetune-{os.getpid()}"
    try:
        path.mkdir()
        (path / "memory.limit_in_bytes").write_text(str(1 << 30))
    except OSError as error:
        pytest.skip(f"no process may make a control group with a memory limit here: {error}")
    yield path
    path.rmdir()


def check_file_limit(ended: Ended) -> None:
    """Assert that a run was refused for the size of a file, in one line."""
    line = ended.refusal()
    assert os.strerror(errno.EFBIG) in line and "free space, then rerun" in line, ended.output


def check_one_error(ended: Ended) -> None:
    """Assert that a run succeeded, was killed, or ended with one error and no traceback."""
    if ended.status is not None and ended.status > 0:
        assert sum(line.startswith("error: ") for line in ended.output.splitlines()) == 1, ended.output
    assert "Traceback" not in ended.output, ended.output


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("stage, limit", {"estimate": 4096, "train": 1024, "report": 4096}.items())
def test_a_file_size_limit(runner, finished, tmp_path, stage, limit):
    workspace = finished.copy(tmp_path / "work")
    old = put_old(workspace, stage)
    check_file_limit(runner.run(stage, workspace, Fault(file_bytes=limit)))
    check_kept_or_new(workspace, stage, old, finished)
    check_rerun(runner, workspace, stage, finished)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("stage, limit", {"tokenize": 4096, "reference": 1024, "train": 1024}.items())
def test_a_file_size_limit_with_pairs(runner, paired, tmp_path, stage, limit):
    workspace = paired.copy(tmp_path / "work")
    old = put_old(workspace, stage)
    check_file_limit(runner.run(stage, workspace, Fault(file_bytes=limit)))
    check_kept_or_new(workspace, stage, old, paired)
    check_rerun(runner, workspace, stage, paired)


def largest(directory: Path) -> int:
    """The size of the largest file of a directory, in bytes."""
    return max(path.stat().st_size for path in directory.rglob("*") if path.is_file())


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_file_size_limit_of_a_merge(runner, trained, tmp_path):
    """The adapter and checkpoints fit below the limit, and the merged model does not."""
    workspace = trained.copy(tmp_path / "work")
    write_params(workspace, {"train.merge": True}, workspace / "params.yaml")
    put_nothing(workspace, "train")
    assert runner.run("train", workspace).status == 0
    whole, merged = digest(workspace / "data/tuned"), largest(workspace / "data/tuned/merged")
    assert merged > largest(trained.root / "data/tuned")
    old = put_old(workspace, "train")
    check_file_limit(runner.run("train", workspace, Fault(file_bytes=merged - 1)))
    assert digest(workspace / "data/tuned") == old["data/tuned"]
    ended = runner.run("train", workspace)
    assert ended.status == 0 and "train: resumed at optimizer step " in ended.output, ended.output
    assert digest(workspace / "data/tuned") == whole


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("what", ["merged", "adapter"])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_an_export_to_a_disk_that_fills_up(mounting, trained, tmp_path, what, share):
    """A model that is half there, or a traceback of safetensors."""
    workspace = trained.copy(tmp_path / "work")
    words = (*OUT, "--what", what)
    assert mounting.run(EXPORT, workspace, Fault(), *words).status == 0
    size, whole = largest(workspace / "out"), digest(workspace / "out")
    disk = workspace / "disk"
    disk.mkdir()
    mounting.mount(disk, DISK_BYTES)
    seen = mounting.seen(workspace) / "disk"
    fill(seen, int(size * share))
    line = mounting.run(EXPORT, workspace, Fault(), "disk/out", *words[1:]).refusal()
    assert line.startswith("--model: disk/out: cannot be written (No space left on device"), line
    assert [path.name for path in seen.iterdir()] == ["ballast"]
    check_file_limit(mounting.run(EXPORT, workspace, Fault(file_bytes=max(1, int(size * share))), "other", *words[1:]))
    assert not (workspace / "other").exists() and not list(workspace.glob(".*partial"))
    (seen / "ballast").unlink()
    assert mounting.run(EXPORT, workspace, Fault(), "disk/out", *words[1:]).status == 0
    assert digest(seen / "out") == whole


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("most_mib", [1, 8, 32])
@pytest.mark.parametrize("stage", ["train", "report"])
def test_a_limit_of_address_space(runner, finished, tmp_path, stage, most_mib):
    """`ulimit -v` in training and in the report; the other stages: `test_interference.py`."""
    check_memory_fault(runner, finished, tmp_path, stage, Fault(memory_bytes=most_mib << 20))


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("most_mib", [1, 8, 32])
@pytest.mark.parametrize("stage", ["tokenize", "reference", "train", "evaluate"])
def test_a_limit_of_address_space_with_pairs(runner, paired, tmp_path, stage, most_mib):
    check_memory_fault(runner, paired, tmp_path, stage, Fault(memory_bytes=most_mib << 20))


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("most_mib", [4, 16, 48])
@pytest.mark.parametrize("stage", ["pin_data", "tokenize", "bucket", "estimate", "train", "evaluate", "report"])
def test_the_limit_of_a_control_group(runner, finished, group, tmp_path, stage, most_mib):
    """The kernel kills one of the stage's processes: a stage that waits for a killed worker hangs."""
    (group / "memory.limit_in_bytes").write_text(str(most_mib << 20))
    check_memory_fault(runner, finished, tmp_path, stage, Fault(group=group))


def check_memory_fault(runner: Runner, finished: Finished, place: Path, stage: str, fault: Fault) -> None:
    """Assert that too little memory loses nothing, and that the same command then gives the same outputs."""
    workspace = finished.copy(place / "work")
    old = put_old(workspace, stage)
    check_one_error(runner.run(stage, workspace, fault))
    check_nothing_half_written(workspace, stage, old, finished)
    (workspace / "scratch/train/oom.json").unlink(missing_ok=True)  # What a run that is out of memory leaves to read.
    check_rerun(runner, workspace, stage, finished)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("most_mib", [1, 8, 32])
def test_a_limit_of_address_space_in_an_export(runner, trained, tmp_path, most_mib):
    workspace = trained.copy(tmp_path / "work")
    ended = runner.run(EXPORT, workspace, Fault(memory_bytes=most_mib << 20), *OUT)
    check_one_error(ended)
    assert (workspace / "out").exists() == (ended.status == 0) and not list(workspace.glob(".*partial"))
