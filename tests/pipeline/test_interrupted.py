"""Interrupted training under DVC: the same command resumes it, also in a temporary copy of the checkout."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from ruamel.yaml import YAML

from tests.pipeline.clone import Clone, commit_all
from tests.processes import TIMEOUT_SECONDS, command_words, kill_group, killed_after, wait_for
from tests.repeatable import repeatable

HERE = ("repro", "--force", "--single-item", "train")
IN_A_COPY = ("exp", "run", "--temp", "--force", "--single-item", "train", "-S", "run.checkpoint_seconds=0.05")
METRICS = "metrics/train.json"


def checkpoints(clone: Clone) -> set[str]:
    """Names of the finished checkpoints of all runs."""
    return {path.name for path in (clone.root / "scratch/train").glob("*/step-*")}


def trainers(clone: Clone) -> list[psutil.Process]:
    """Running training processes."""
    return [one for one in clone.processes() if one.is_running() and command_words(one)[1:] == ["-m", "stages.train"]]


def interrupted(
    clone: Clone,
    log: Path,
    command: tuple[str, ...],
    end: Callable[[subprocess.Popen[Any]], object],
    sign: Callable[[Clone], set[str]] = checkpoints,
) -> str:
    """Output of a training run that `end` interrupts once it has another checkpoint, or another `sign`."""
    before = sign(clone)
    with open(log, "w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "dvc", *command],
            cwd=clone.root,
            env=clone.environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        with killed_after(process):
            wait_for(lambda: sign(clone) - before, process)
            end(process)
            assert process.wait(TIMEOUT_SECONDS) != 0
    wait_for(lambda: not trainers(clone))
    return log.read_text()


def results(clone: Clone, revision: str) -> tuple[Any, dict[str, Any]]:
    """Hash of the tuned weights, and the reproducible metrics, of a commit."""
    yaml = YAML(typ="safe")
    lock, metrics = (yaml.load(clone.run("git", "show", f"{revision}:{name}")) for name in ("dvc.lock", METRICS))
    tuned = [out for out in lock["stages"]["train"]["outs"] if out["path"] == "data/tuned"]
    return tuned, repeatable(metrics)


@pytest.mark.slow
def test_training_resumes_after_dvc_or_training_was_killed(clone: Clone, tmp_path: Path):
    """No process may run on after DVC, and no step be lost with a temporary copy of the checkout."""
    clone.set_params(run__checkpoint_seconds=0.05)
    first = interrupted(clone, tmp_path / "first", HERE, lambda dvc: dvc.terminate())
    assert "train: stopped by the end of its parent; the checkpoint of optimizer step" in first
    assert " D " not in clone.run("git", "status", "--porcelain"), "DVC deletes a stage's metrics before it runs"
    clone.back_to_baseline()  # Without a git identity DVC copies no changed checkout.
    second = interrupted(clone, tmp_path / "second", IN_A_COPY, lambda _: trainers(clone)[0].kill())
    assert "train: resumed at optimizer step" in second
    third = clone.dvc(*IN_A_COPY)
    assert "train: resumed at optimizer step" in third
    assert len(checkpoints(clone)) == 1, "the last one, until the next run begins"
    revision = clone.run("git", "for-each-ref", "--format=%(objectname)", "refs/exps").split()[-1]
    assert results(clone, revision) == results(clone, "HEAD")


def finished(clone: Clone) -> set[str]:
    """Contents of the markers of finished runs."""
    return {path.read_text() for path in (clone.root / "scratch/train").glob("*/finished")} - {""}


@pytest.mark.slow
def test_kill_before_dvc_records_the_outputs_costs_no_step(clone: Clone, tmp_path: Path):
    """DVC removes the outputs before it reruns the stage, and hashing large ones takes minutes."""
    first = interrupted(clone, tmp_path / "first", HERE, kill_group, finished)
    assert "resumed" not in first
    second = clone.dvc(*HERE)
    resumed = re.search(r"train: resumed at optimizer step (\d+) of (\d+) ", second)
    assert resumed is not None and resumed[1] == resumed[2], second
    commit_all(clone)
    assert results(clone, "HEAD") == results(clone, "HEAD~1")
    third = clone.dvc(*HERE)
    assert "resumed" not in third, "--force trains a recorded run again"


def tuned(clone: Clone) -> Any:
    """What dvc.lock says of the tuned weights: a hash of every byte."""
    lock = YAML(typ="safe").load((clone.root / "dvc.lock").read_text())
    return next(out for out in lock["stages"]["train"]["outs"] if out["path"] == "data/tuned")


@pytest.mark.slow
def test_state_on_disk_learns_the_bytes_of_memory_also_after_a_kill(clone: Clone, tmp_path: Path):
    """train.offload_to=disk with other weights than in memory, without a prediction, or lost with its file."""
    clone.set_params(train__method="full", train__lr=1e-3, run__checkpoint_seconds=0.05)
    clone.dvc("repro", "train")
    in_memory = tuned(clone)
    clone.set_params(train__offload="optimizer", train__offload_to="disk")
    first = interrupted(clone, tmp_path / "first", ("repro", "train"), lambda _: trainers(clone)[0].kill())
    assert "Running stage 'estimate'" in first and "Running stage 'train'" in first
    assert "train: resumed at optimizer step" in clone.dvc("repro", "train")
    assert tuned(clone) == in_memory
    assert clone.json("data/estimate/figures.json")["disk_bytes_predicted"] > 0
