"""A workspace before a run that is disturbed, and what must hold after it."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.faults.outputs import ABSENT, declared, listing, state
from tests.faults.stage_run import Fault, Runner

OLD = "what an earlier run with other parameters left"
LINKS = {"pin_data": "locks/watched-data*", "pin_model": "locks/watched-model"}
"""What the pin stages write besides their outputs."""


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A workspace in which stages ran undisturbed."""

    root: Path
    states: dict[str, dict[str, str]]
    """Stage → its outputs' hashes."""
    seconds: dict[str, float]
    """Stage → how long it ran."""
    listing: list[str]
    """Every path in it."""

    def copy(self, to: Path) -> Path:
        """A workspace of the same content."""
        return shutil.copytree(self.root, to, symlinks=True, dirs_exist_ok=True)


def put_old(workspace: Path, stage: str) -> dict[str, str]:
    """Replace a stage's outputs by others, as an earlier run leaves them, with no unfinished work; their hashes."""
    put_nothing(workspace, stage)
    for path in declared(stage):
        file = workspace / path if Path(path).suffix == ".json" else workspace / path / "old.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f'"{OLD}"')
    return state(workspace, stage)


def put_nothing(workspace: Path, stage: str) -> dict[str, str]:
    """Remove a stage's outputs, as DVC does before it runs one, its links and unfinished work; the outputs' hashes."""
    links = workspace.glob(LINKS[stage]) if stage in LINKS else ()
    for path in [*links, *(workspace / one for one in [*declared(stage), "scratch"])]:
        remove(path)
    return state(workspace, stage)


def remove(path: Path) -> None:
    """Remove a file or directory that may be there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def check_nothing_half_written(workspace: Path, stage: str, old: dict[str, str], finished: Finished) -> None:
    """Each output is the old one, the new one, or absent."""
    for path, now in state(workspace, stage).items():
        assert now in (ABSENT, old[path], finished.states[stage][path]), f"{path} is half-written"


def check_kept_or_new(workspace: Path, stage: str, old: dict[str, str], finished: Finished) -> None:
    """Each output is the old or the new one; no temporary file is left except in scratch/."""
    for path, now in state(workspace, stage).items():
        assert now in (old[path], finished.states[stage][path]), f"{path} is half-written"
    left = {line for line in listing(workspace) if ".partial" in line and not line.startswith("scratch/")}
    assert left == set()


def check_rerun(runner: Runner, workspace: Path, stage: str, finished: Finished) -> str:
    """Run the command again: it gives the undisturbed outputs and cleans up; return its output."""
    ended = runner.run(stage, workspace)
    assert ended.status == 0, ended.output
    assert state(workspace, stage) == finished.states[stage]
    assert listing(workspace) == finished.listing
    return ended.output


def changes_of(runner: Runner, workspace: Path, stage: str, notes: Path) -> list[str]:
    """The changes of directory entries that a run over old outputs makes, in order."""
    put_old(workspace, stage)
    ended = runner.run(stage, workspace, Fault(changes=notes))
    assert ended.status == 0, ended.output
    return notes.read_text().splitlines()
