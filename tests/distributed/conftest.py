"""Groups of processes, and a workspace in which train runs on several processes."""

import shutil
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from lean_finetune.distributed.processes import SINGLE_PROCESS
from stages.pin import main as pin
from stages.tokenize import main as tokenize
from tests.conftest import ROOT
from tests.distributed.cases import Case, learn
from tests.distributed.group import Group, group_of
from tests.workspace import invoke, lay_out, write_verdict

ROWS = 120
Single = Callable[[Case], dict[str, Any]]


@pytest.fixture(scope="package")
def pair() -> Iterator[Group]:
    """Two processes."""
    with group_of(2) as group:
        yield group


@pytest.fixture(scope="package")
def four() -> Iterator[Group]:
    """Four processes."""
    with group_of(4) as group:
        yield group


@pytest.fixture(scope="package")
def single() -> Single:
    """Runs a case in this process; equal cases once."""
    known: dict[str, dict[str, Any]] = {}

    def of(case: Case) -> dict[str, Any]:
        key = repr(case)
        if key not in known:
            outcome = learn(case, SINGLE_PROCESS)
            weights = {name: tensor.clone() for name, tensor in outcome.parallel.full_parameters()}
            more = {"expert_loads": outcome.expert_loads, "rewards": outcome.rewards}
            known[key] = {"losses": outcome.losses, "norms": outcome.norms, "weights": weights, **more}
        return known[key]

    return of


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A sum over threads may take another order in each run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows, tokens, locks and a verdict: all that train reads but the plan."""
    root = tmp_path_factory.mktemp("workspace")
    lay_out(
        root,
        data__source="rows.jsonl",
        data__heldout_fraction=0.4,
        data__max_length=96,
        bucket__max_tokens=256,
        train__tokens_per_step=512,
        train__epochs=1,
        train__heldout_every_steps=4,
        train__heldout_rows=8,
        run__cpu_threads=1,
        run__data_workers=1,
        run__data_pool="threads",
    )
    with open(ROOT / "data/raw/sample.jsonl") as rows:
        (root / "rows.jsonl").write_text("".join(islice(rows, ROWS)))
    write_verdict(root)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        for command, arguments in ((pin, ["data"]), (pin, ["model"]), (tokenize, [])):
            assert invoke(command, *arguments).exit_code == 0
    return root


@pytest.fixture
def copy(workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the workspace, which is the current directory."""
    shutil.copytree(workspace, tmp_path, dirs_exist_ok=True, symlinks=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path
