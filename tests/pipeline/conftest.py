"""One clone with one finished run, shared by all pipeline tests. Each test restores its workspace."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.pipeline.clone import Clone, commit_all, make_clone


@dataclass(frozen=True)
class FirstRun:
    """What the first `dvc repro` printed, and the parameters each stage read."""

    output: str
    reads: Path


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Clone, FirstRun]]:
    """A clone in which `dvc repro` ran once and its results were committed."""
    base = tmp_path_factory.mktemp("pipeline")
    clone = make_clone(base / "repo")
    reads = base / "reads"
    reads.mkdir()
    output = clone.dvc("repro", env={"LEAN_FINETUNE_PARAM_READS": str(reads)})
    commit_all(clone)
    yield clone, FirstRun(output, reads)
    clone.end_processes()


@pytest.fixture
def clone(finished: tuple[Clone, FirstRun]) -> Iterator[Clone]:
    """The shared clone, whose workspace is restored after the test."""
    shared = finished[0]
    yield shared
    shared.end_processes()
    shared.back_to_baseline()
    shutil.rmtree(shared.root / "scratch/train", ignore_errors=True)  # Checkpoints of runs that are not recorded.
