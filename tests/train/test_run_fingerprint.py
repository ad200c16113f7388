"""Fingerprint of a run: which changes make it another run, and which do not."""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from lean_finetune.config.load import load_params
from lean_finetune.core.atomic_files import write_sealed
from lean_finetune.core.errors import UserError
from lean_finetune.pinning.code import PACKAGE, code_hashes
from lean_finetune.plan.batch_plan import Plan, write_plan
from lean_finetune.train import resume_run as module
from lean_finetune.train.make_job import Paths
from lean_finetune.train.resume_run import refuse_different_runs, resumable_part, run_fingerprint, run_key
from tests.conftest import ROOT
from tests.memory.common import micro_batch
from tests.processes import run_bounded
from tests.small_model import CPU


def plan_of(rows: list[list[int]], ranks: int = 1) -> Plan:
    """One step; micro-batches are dealt to ranks in turn."""
    return Plan.of([micro_batch(0, one, 9, 4, rank=n % ranks) for n, one in enumerate(rows)], ranks=ranks)


def lock(name: str, digest: str, place: str = "here") -> str:
    """The text of a lock of one file."""
    named: dict[str, Any] = {
        "kind": "directory",
        "name": place,
        "revision": None,
        "tokenizer_files": [],
        "stop_ids": [],
    }
    return json.dumps({**named, "files": {name: digest}})


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """The input files of stage train."""
    directory = tmp_path / "inputs"
    (directory / "tokens/train").mkdir(parents=True)
    for name in ("tokens/train/00000.arrow", "tokens/meta.json"):
        (directory / name).write_text(name)
    for name in ("model", "tokenizer"):
        (directory / f"{name}_lock").write_text(lock(name, "0"))
    write_sealed(directory / "precision", {"precision": "fp32"})
    write_plan(directory / "plan.arrow", [plan_of([[0, 1], [2, 3]])], settings_hash="0a")
    return directory


def key_of(inputs: Path, threads: int = 1, **train: Any) -> str:
    """The name of the run's directory."""
    params = load_params(ROOT / "params.yaml")
    params = params.model_copy(update={"train": params.train.model_copy(update=train)})
    names = [name for name in Paths.__dataclass_fields__ if name != "batches"]
    paths = Paths(batches=inputs, **{name: inputs / name for name in names})
    return run_key(resumable_part(run_fingerprint(params, paths, CPU, threads)))


def test_same_run_in_another_directory_has_the_same_key(inputs: Path, tmp_path: Path):
    """DVC's temporary and queued runs read copies and resume the checkout's checkpoints."""
    shutil.copytree(inputs, tmp_path / "copy")
    (tmp_path / "copy/model_lock").write_text(lock("model", "0", "elsewhere"))
    assert key_of(inputs) == key_of(tmp_path / "copy")


@pytest.mark.parametrize(("rows", "ranks", "same"), [([[0, 1], [2, 3]], 2, True), ([[0, 1], [2, 4]], 1, False)])
def test_rows_of_a_step_make_the_run_and_how_gpus_share_them_does_not(inputs: Path, rows, ranks: int, same: bool):
    """A run that is moved to another number of GPUs starts at the first step."""
    before = key_of(inputs)
    write_plan(inputs / "plan.arrow", [plan_of(rows, ranks=ranks)], settings_hash="0a")
    assert (key_of(inputs, sharding="zero2") == before) is same


@pytest.mark.parametrize("change", [{"lr": 0.5}, {"threads": 64}, {"optimizer": "sgd"}], ids=str)
def test_another_parameter_is_another_run(inputs: Path, change: dict[str, Any]):
    assert key_of(inputs, **change) != key_of(inputs)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokens/train/00000.arrow", "changed"),
        ("tokens/train/00001.arrow", "more rows"),
        ("model_lock", lock("model", "1")),
        ("tokenizer_lock", lock("tokenizer", "1")),
        ("precision", None),
    ],
)
def test_other_data_or_another_model_is_another_run(inputs: Path, name: str, content: str | None):
    before = key_of(inputs, precision="auto")
    if content is None:
        write_sealed(inputs / name, {"precision": "bf16"})
    else:
        (inputs / name).write_text(content)
    assert key_of(inputs, precision="auto") != before


@pytest.mark.parametrize("name", ["code_hashes", "version"])
def test_other_code_or_libraries_are_another_run(inputs: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    """Code that was edited between two processes would train differently from the middle on."""
    before = key_of(inputs)
    monkeypatch.setattr(module, name, lambda _: "other")
    assert key_of(inputs) != before


@pytest.mark.slow
def test_code_in_the_fingerprint_is_all_that_training_loads():
    """A module that trains but is not in the fingerprint: after an edit, a stale checkpoint is resumed."""
    program = (
        "import json, sys, stages.train, lean_finetune.train.train_run\n"
        "print(json.dumps([module.__file__ for module in sys.modules.values() if getattr(module, '__file__', None)]))"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = run_bounded([sys.executable, "-c", program], cwd=ROOT, env=environment, check=True)
    ours = [Path(file) for file in json.loads(done.stdout) if Path(file).is_relative_to(PACKAGE)]
    loaded = {file.relative_to(ROOT).as_posix() for file in ours if file.name != "__init__.py"}
    assert loaded - set(code_hashes("stages.train")) == set()
    command = {"core/stage_command.py", "core/torchrun_threads.py", "stages/train.py"}
    assert loaded - set(code_hashes(module.TRAINING)) <= {f"lean_finetune/{name}" for name in command}


def test_processes_with_many_other_settings_name_the_first_few():
    """A line with a hundred names, or so few that the one that matters is not among them."""
    own = {f"train.p{number}": number for number in range(8)}
    other = json.dumps(["b", {name: json.dumps(-1) for name in own}])
    channel = Mock()
    channel.gather_after_work.return_value = [(1,), (2,)]
    channel.gather_text.side_effect = lambda text: [text, other]
    with pytest.raises(UserError, match=r"7 more differ \(train\.p1, train\.p2, train\.p3, train\.p4, train\.p5, …\)"):
        refuse_different_runs({"parameters": own}, channel)
