"""Workspaces for runs with a fault, and the conditions after one."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.faults.outputs import ABSENT, declared, listing, state
from tests.faults.stage_run import Fault, Runner

OLD = "what an earlier run with other parameters left"
LINKS = {"pin_data": "locks/watched-data*", "pin_model": "locks/watched-[am]*"}
"""What the pin stages write besides their outputs."""


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A workspace in which stages ran without a fault."""

    root: Path
    states: dict[str, dict[str, str]]
    """Hashes of outputs, by stage."""
    seconds: dict[str, float]
    """Duration in seconds, by stage."""
    listing: list[str]
    """All paths in it."""

    def copy(self, to: Path) -> Path:
        """Copy the workspace."""
        return shutil.copytree(self.root, to, symlinks=True, dirs_exist_ok=True)


def put_old(workspace: Path, stage: str) -> dict[str, str]:
    """Replace outputs by different ones of an earlier run, delete unfinished work, and return the hashes."""
    put_nothing(workspace, stage)
    for path in declared(stage):
        file = workspace / path if Path(path).suffix == ".json" else workspace / path / "old.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f'"{OLD}"')
    return state(workspace, stage)


def put_nothing(workspace: Path, stage: str) -> dict[str, str]:
    """Remove a stage's outputs as DVC does before a run, its links and unfinished work; return the outputs' hashes."""
    links = workspace.glob(LINKS[stage]) if stage in LINKS else ()
    for path in [*links, *(workspace / one for one in [*declared(stage), "scratch"])]:
        remove(path)
    return state(workspace, stage)


def remove(path: Path) -> None:
    """Remove a file or directory if it exists."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def check_nothing_half_written(workspace: Path, stage: str, old: dict[str, str], finished: Finished) -> None:
    """Assert that each output is the old one, the new one, or absent."""
    for path, now in state(workspace, stage).items():
        assert now in (ABSENT, old[path], finished.states[stage][path]), f"{path} is half-written"


def check_kept_or_new(workspace: Path, stage: str, old: dict[str, str], finished: Finished) -> None:
    """Assert that each output is the old or the new one, and that temporary files are left in scratch/ only."""
    for path, now in state(workspace, stage).items():
        assert now in (old[path], finished.states[stage][path]), f"{path} is half-written"
    left = {line for line in listing(workspace) if ".partial" in line and not line.startswith("scratch/")}
    assert left == set()


def check_rerun(runner: Runner, workspace: Path, stage: str, finished: Finished) -> str:
    """Run again; assert that outputs equal the reference and nothing is left over; return what it printed."""
    ended = runner.run(stage, workspace)
    assert ended.status == 0, ended.output
    assert state(workspace, stage) == finished.states[stage]
    assert listing(workspace) == finished.listing
    return ended.output


def changes_of(runner: Runner, workspace: Path, stage: str, notes: Path) -> list[str]:
    """Return the directory changes of a run over old outputs, in order."""
    put_old(workspace, stage)
    ended = runner.run(stage, workspace, Fault(changes=notes))
    assert ended.status == 0, ended.output
    return notes.read_text().splitlines()
