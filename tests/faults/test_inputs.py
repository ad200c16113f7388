"""Damage to any file that a stage reads: one line and no output, or the outputs of an undamaged one."""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from lean_finetune.core.arrow_files import open_batches, read_column
from tests.faults.outputs import ABSENT, STAGES, state
from tests.faults.stage_run import Ended, Runner
from tests.faults.workspaces import Finished, put_nothing, remove

SEED = 46
SECONDS = 60
"""A stage that waits for a pipe's writer does not end."""
NOT_TRAINED = {"evaluate": ("data/tuned",), "report": ("locks", "data/tuned")}
"""Inputs, by stage, whose changed values are read as they are: no weights follow from them. DVC compares their hash."""


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def to_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def a_byte(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= draw.randrange(1, 256)
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], None]] = {"pipe": a_pipe, "directory": a_directory, "half": to_half}
"""By name. Each file gets one of them, and another byte."""


def inputs_of(stage: str, workspace: Path) -> list[str]:
    """The files in data/ and locks/ that a stage depends on, by their path in the workspace."""
    found: list[Path] = []
    for name in STAGES[stage]["deps"]:
        path = workspace / name
        if not name.startswith("locks/code"):
            found += [one for one in ([path] if path.is_file() else sorted(path.rglob("*"))) if one.is_file()]
    return [str(path.relative_to(workspace)) for path in found if not path.is_symlink()]


def damaged(stage: str, workspace: Path) -> Iterator[tuple[str, str]]:
    """Damage one input after the other, and yield its name and the damage; it is put back afterwards."""
    draw = random.Random(f"{SEED} {stage}")
    for name in inputs_of(stage, workspace):
        path, kept = workspace / name, workspace.parent / "kept"
        shutil.copyfile(path, kept)
        other = draw.choice([*DAMAGES] if path.stat().st_size else ["pipe", "directory"])
        if path.stat().st_size:
            a_byte(path, draw)
            yield name, "byte"
            shutil.copyfile(kept, path)
        DAMAGES[other](path)
        yield name, other
        remove(path)
        shutil.copyfile(kept, path)


def judged(stage: str, name: str, ended: Ended, workspace: Path, finished: Finished, old: dict[str, str]) -> str | None:
    """What is wrong with how a run ended; None if nothing is."""
    now = state(workspace, stage)
    if ended.status is None:
        return "hangs"
    if ended.status == 0:
        # A table of stage reference names the bytes of the tokens, of which a few are padding.
        same = (
            values_of(workspace) == values_of(finished.root) if stage == "reference" else now == finished.states[stage]
        )
        return None if same or any(map(name.startswith, NOT_TRAINED.get(stage, ()))) else "silent"
    if ended.status not in (1, 3) or len(ended.faults()) != 1 or not ended.faults()[0].startswith("error: "):
        return "traceback"
    if not all(now[path] in (ABSENT, old[path], finished.states[stage][path]) for path in now):
        return "half-written"
    return None


def values_of(workspace: Path) -> list[list[float]]:
    """The log-probabilities of stage reference."""
    paths = sorted((workspace / "data/reference").iterdir())
    return [read_column(open_batches(path, {}), "logp", np.float32).tolist() for path in paths]


def faults_of(stage: str, runner: Runner, finished: Finished, place: Path) -> list[str]:
    """The damages that a stage does not refuse as it should."""
    workspace, found, count = finished.copy(place / "work"), [], 0
    for name, damage in damaged(stage, workspace):
        old = put_nothing(workspace, stage)
        ended = runner.run_briefly(stage, workspace, SECONDS)
        count += 1
        if (fault := judged(stage, name, ended, workspace, finished, old)) is not None:
            last = ended.output.strip().splitlines()[-1:] or [""]
            found.append(f"{name}: {damage}: {fault}: {last[0]}")
    assert count, "no input was damaged"
    print(f"{stage}: {count} damages")
    return found


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("stage", ["tokenize", "bucket", "estimate", "train", "evaluate", "report"])
def test_damage_to_any_input(runner, finished, tmp_path, stage):
    assert faults_of(stage, runner, finished, tmp_path) == []


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("stage", ["bucket", "reference", "train", "evaluate"])
def test_damage_to_any_input_of_pairs(runner, paired, tmp_path, stage):
    assert faults_of(stage, runner, paired, tmp_path) == []
