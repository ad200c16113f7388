"""A server process that forks stages, and a workspace with the outputs of all stages; each test uses a copy of it."""

import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.faults.outputs import STAGES, listing, state
from tests.faults.stage_run import Runner
from tests.faults.workspaces import Finished
from tests.processes import run_bounded
from tests.workspace import lay_out, write_verdict

BEFORE_TRAINING = ("pin_code", "pin_data", "pin_model", "tokenize", "bucket")
ROWS = 700
"""Tokenize divides these rows into six blocks, in two shards."""
SMALL = {
    "data__source": "rows.jsonl",
    "data__heldout_fraction": 0.9,
    "data__max_length": 128,
    "bucket__max_tokens": 512,
    "train__tokens_per_step": 512,
    "train__epochs": 1,
    "train__heldout_every_steps": 4,
    "train__heldout_rows": 8,
    "evaluate__loss_rows": 16,
    "evaluate__generate_rows": 4,
    "evaluate__max_new_tokens": 4,
    "run__cpu_threads": 1,
    "run__data_workers": 2,
    "run__tokenizer_engine": "tokenizers",
    "run__checkpoint_seconds": 0.001,
}


NAMESPACE = ("unshare", "--mount") if os.geteuid() == 0 else ("unshare", "--map-root-user", "--mount")
"""Only its child processes see the mounts made in it; they are removed when it exits."""


@pytest.fixture(scope="session")
def why_no_mounts(tmp_path_factory: pytest.TempPathFactory) -> str | None:
    """Return why a process cannot mount a private file system on this machine; None if it can."""
    if shutil.which(NAMESPACE[0]) is None:
        return f"no {NAMESPACE[0]}"
    tried = run_bounded([*NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", tmp_path_factory.mktemp("tried")])
    return tried.stderr.strip() if tried.returncode else None


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory, why_no_mounts: str | None) -> Iterator[Runner]:
    """Runs stages in forked processes."""
    if sys.platform != "linux":
        pytest.skip("needs Linux's /proc, sessions and capabilities")
    running = Runner(NAMESPACE if why_no_mounts is None else (), tmp_path_factory.mktemp("runner") / "errors.txt")
    yield running
    running.close()


@pytest.fixture(scope="session")
def mounting(runner: Runner, why_no_mounts: str | None) -> Runner:
    """A runner with a private mount namespace."""
    if why_no_mounts is not None:
        pytest.skip(f"no process may mount a file system for itself here: {why_no_mounts}")
    return runner


@pytest.fixture(scope="session")
def quick(runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A run without faults of the stages before training, with a fixed verdict in place of estimate's."""
    root = lay_out(tmp_path_factory.mktemp("quick"), **SMALL)
    with open(ROOT / "data/raw/sample.jsonl") as rows:
        (root / "rows.jsonl").write_text("".join(islice(rows, ROWS)))
    (root / "metrics").mkdir()
    write_verdict(root)
    return reference_run(runner, root, BEFORE_TRAINING)


@pytest.fixture(scope="session")
def trained(runner: Runner, quick: Finished, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """`quick` with training and evaluation."""
    return reference_run(runner, quick.copy(tmp_path_factory.mktemp("trained")), ("train", "evaluate"), quick)


@pytest.fixture(scope="session")
def finished(runner: Runner, quick: Finished, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A run of all stages without faults."""
    later = [stage for stage in STAGES if stage not in BEFORE_TRAINING]
    return reference_run(runner, quick.copy(tmp_path_factory.mktemp("finished")), later, quick)


@pytest.fixture(scope="session")
def paired(runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A run of all stages but report on preference pairs, with a fixed verdict in place of estimate's."""
    root = lay_out(tmp_path_factory.mktemp("paired"), **SMALL, train__objective="dpo")
    words = "red green blue white black grey brown pink".split()
    rows = [
        {"prompt": f"{n} {words[n % 8]}", "chosen": f"{n} is {words[n % 7]}", "rejected": f"no {n}"} for n in range(200)
    ]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "metrics").mkdir()
    write_verdict(root)
    return reference_run(runner, root, (*BEFORE_TRAINING, "reference", "train", "evaluate"))


def reference_run(runner: Runner, root: Path, stages: Iterable[str], before: Finished | None = None) -> Finished:
    """Run stages without a fault, as a reference for runs with one. `before`: stages that have already run."""
    seconds = dict(before.seconds) if before else {}
    for stage in stages:
        ended = runner.run(stage, root)
        assert ended.status == 0, ended.output
        seconds[stage] = ended.seconds
    return Finished(
        root=root, states={stage: state(root, stage) for stage in seconds}, seconds=seconds, listing=listing(root)
    )
