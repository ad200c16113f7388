"""One process that forks stages, and one workspace in which all of them ran; every test works in a copy."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pytest

from stages.files import write_json
from tests.conftest import ROOT
from tests.faults.outputs import STAGES, listing, state
from tests.faults.stage_run import Runner
from tests.workspace import lay_out

ROWS = 700
"""Six blocks of tokenize in two shards."""
SMALL = {
    "data__source": "rows.jsonl",
    "data__heldout_fraction": 0.9,
    "data__max_length": 128,
    "bucket__max_tokens": 512,
    "train__tokens_per_step": 1024,
    "train__epochs": 1,
    "train__heldout_every_steps": 4,
    "train__heldout_rows": 8,
    "evaluate__loss_rows": 16,
    "evaluate__generate_rows": 4,
    "evaluate__max_new_tokens": 4,
    "run__cpu_threads": 1,
    "run__data_workers": 2,
}


STAND_IN = {"enforce": True, "refusal": None}
"""A verdict in place of that of estimate, whose many traces take longer than all other stages together."""


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
        return shutil.copytree(self.root, to, symlinks=True)


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """Forks stages."""
    running = Runner([], tmp_path_factory.mktemp("runner") / "errors.txt")
    yield running
    running.close()


@pytest.fixture(scope="session")
def quick(runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """An undisturbed run of all stages but estimate, which has a stand-in, and report, which reads it."""
    root = new_workspace(tmp_path_factory.mktemp("quick"))
    write_json(root / "data/estimate/verdict.json", STAND_IN)
    shutil.copy2(ROOT / "metrics/estimate.json", root / "metrics/estimate.json")
    return undisturbed(runner, root, [stage for stage in STAGES if stage not in ("estimate", "report")])


@pytest.fixture(scope="session")
def finished(runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """An undisturbed run of all stages."""
    return undisturbed(runner, new_workspace(tmp_path_factory.mktemp("finished")), list(STAGES))


def new_workspace(root: Path) -> Path:
    """Parameters and rows."""
    lay_out(root, **SMALL)
    with open(ROOT / "data/raw/sample.jsonl") as rows:
        (root / "rows.jsonl").write_text("".join(islice(rows, ROWS)))
    (root / "metrics").mkdir()
    return root


def undisturbed(runner: Runner, root: Path, stages: list[str]) -> Finished:
    """The run that disturbed ones are compared with."""
    seconds = {}
    for stage in stages:
        ended = runner.run(stage, root)
        assert ended.status == 0, ended.output
        seconds[stage] = ended.seconds
    states = {stage: state(root, stage) for stage in stages}
    return Finished(root=root, states=states, seconds=seconds, listing=listing(root))
