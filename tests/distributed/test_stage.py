"""`python -m stages.train` on several processes, as a user runs it: same curve, whole outputs, one error."""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import psutil
import pytest
import torch
from peft import PeftModel
from ruamel.yaml import YAML
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from stages.bucket import main as bucket
from stages.pin import main as pin
from stages.tokenize import main as tokenize
from stages.train import main as train
from tests.conftest import ROOT
from tests.processes import kill_group, killed_after
from tests.workspace import invoke, lay_out, run_module, write_verdict

pytestmark = pytest.mark.multiprocess

ROWS, STEPS = 120, 6
LOSS = 1e-5
ENDS_SECONDS = 30
"""Within which all processes of a run are gone after one of them was killed."""

Run = Callable[..., Path]


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


def change(root: Path, **values: object) -> None:
    """Write other values into params.yaml, keys dotted with two underscores."""
    yaml = YAML()
    params = yaml.load((root / "params.yaml").read_text())
    for dotted, value in values.items():
        section, key = dotted.split("__")
        params[section][key] = value
    with open(root / "params.yaml", "w") as file:
        yaml.dump(params, file)


@pytest.fixture
def copy(workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A workspace of one's own, with a plan for two processes."""
    shutil.copytree(workspace, tmp_path, dirs_exist_ok=True, symlinks=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def planned(root: Path, gpus: int, sharding: str, **values: object) -> None:
    change(root, hardware__num_gpus=gpus, train__sharding=sharding, **values)
    assert invoke(bucket).exit_code == 0


def curve(root: Path) -> list[dict[str, str]]:
    with open(root / "data/train/curves.csv", newline="") as file:
        return list(csv.DictReader(file))


def train_alone(root: Path, **values: object) -> Path:
    """A run in this process; where its outputs were put."""
    planned(root, 1, "none", **values)
    threads = torch.get_num_threads()
    assert invoke(train).exit_code == 0
    torch.set_num_threads(threads)
    for output in ("data/train", "data/tuned"):
        shutil.move(root / output, root / "alone" / output)
    return root / "alone"


def assert_same_learning(found: Path, alone: Path) -> None:
    """Losses of every step, held-out losses, and what the outputs hold."""
    ours, theirs = curve(found), curve(alone)
    assert len(ours) == len(theirs) >= STEPS
    for a, b in zip(ours, theirs, strict=True):
        for column in ("loss", "heldout_loss"):
            assert bool(a[column]) == bool(b[column])
            assert float(a[column] or 0) == pytest.approx(float(b[column] or 0), abs=LOSS)
        assert [a[key] for key in ("tokens", "supervised_tokens", "lr")] == [
            b[key] for key in ("tokens", "supervised_tokens", "lr")
        ]
    for file in sorted((alone / "data/tuned").iterdir()):
        other = found / "data/tuned" / file.name
        if file.suffix != ".safetensors":
            assert other.read_bytes() == file.read_bytes(), file.name
            continue
        tensors, expected = load_file(other), load_file(file)
        assert tensors.keys() == expected.keys()
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # What plain peft meets.
@pytest.mark.slow
def test_two_processes_write_what_one_writes(copy: Path, tiny_dir: Path):
    """zero3 on 4-bit weights with joined rows: the adapter is gathered, and fits the model in plain peft."""
    alone = train_alone(copy, bucket__mode="packed")
    planned(copy, 2, "zero3")
    done = run_module("stages.train", cwd=copy, check=True)
    assert done.stderr == ""
    assert_same_learning(copy, alone)
    metrics = json.loads((copy / "data/train/figures.json").read_text())
    assert "2 processes" in metrics["peak_measured_how"] and metrics["peak_bytes_measured"] > 0
    assert {path.name for path in (copy / "scratch/train/ranks").glob("*/*")} == {"1.log", "lock"}
    base = AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32)
    assert PeftModel.from_pretrained(base, str(copy / "data/tuned")).peft_config


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["ddp", "zero1", "zero2", "zero3"])
def test_a_full_model_is_written_whole(copy: Path, sharding: str):
    alone = train_alone(copy, train__method="full", train__lr=1e-3)
    planned(copy, 2, sharding)
    run_module("stages.train", cwd=copy, check=True)
    assert_same_learning(copy, alone)
    loaded = AutoModelForCausalLM.from_pretrained(copy / "data/tuned", dtype=torch.float32)
    assert all(torch.isfinite(parameter).all() for parameter in loaded.parameters())


@pytest.mark.slow
def test_a_fault_of_the_users_is_told_once(copy: Path):
    """Every process meets it; a user wants one line."""
    planned(copy, 2, "zero3", train__lr=1e30)
    done = run_module("stages.train", cwd=copy)
    assert done.returncode == 1 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("error: train.lr: ")


def started(root: Path, stack_environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """A run that goes on while the test does something to it."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(stack_environment or {})}
    return subprocess.Popen(
        [sys.executable, "-m", "stages.train"],
        cwd=root,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def processes_of(launcher: subprocess.Popen[str], root: Path) -> list[psutil.Process]:
    """The processes of a run once every one of them trains: each has opened its log by then."""
    end = time.monotonic() + 120
    while not list(root.glob("scratch/train/ranks/*/1.log")):
        assert launcher.poll() is None and time.monotonic() < end, launcher.stderr and launcher.stderr.read()
        time.sleep(0.1)
    return psutil.Process(launcher.pid).children(recursive=True)


@contextmanager
def running(root: Path) -> Iterator[subprocess.Popen[str]]:
    """A run that has ended, one way or the other, when the block does."""
    launcher = started(root)
    with killed_after(launcher):
        try:
            yield launcher
        finally:
            kill_group(launcher)


def said_by(launcher: subprocess.Popen[str]) -> str:
    """What a run that has ended said."""
    assert launcher.stderr is not None
    with launcher.stderr as stream:
        return stream.read()


@pytest.mark.slow
def test_a_signal_ends_all_with_one_line(copy: Path):
    """Each process would tell of it, and of the others' end."""
    planned(copy, 2, "ddp", train__epochs=200)
    with running(copy) as launcher:
        ranks = processes_of(launcher, copy)
        launcher.send_signal(signal.SIGTERM)
        launcher.wait(ENDS_SECONDS)
        assert not psutil.wait_procs(ranks, timeout=ENDS_SECONDS)[1]
    said = said_by(launcher)
    assert launcher.returncode == 128 + signal.SIGTERM
    assert said.removeprefix("train: ").startswith("stopped by SIGTERM") and len(said.splitlines()) == 1


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_in_order(copy: Path):
    """As somebody does who kills what a list of processes shows."""
    planned(copy, 2, "zero3", train__epochs=200)
    with running(copy) as launcher:
        ranks, end = processes_of(launcher, copy), time.monotonic() + ENDS_SECONDS
        while not steps_begun(copy):
            assert time.monotonic() < end
            time.sleep(0.1)
        ranks[1].send_signal(signal.SIGTERM)
        launcher.wait(ENDS_SECONDS)
    said = said_by(launcher)
    assert launcher.returncode == 128 + signal.SIGTERM, said
    [line] = said.splitlines()
    assert re.fullmatch(r"train: stopped by SIGTERM; the checkpoint of optimizer step \d+ is kept: .*", line)


def steps_begun(root: Path) -> int:
    """The step that some process of a run says it has begun."""
    files = root.glob("scratch/train/running/*/last_step.json")
    return max((json.loads(file.read_text())["step"] or 0 for file in files), default=0)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["rank", "launcher"])
def test_nothing_outlives_a_killed_process(copy: Path, victim: str):
    """An orphan would hold its GPU's memory until someone finds it."""
    planned(copy, 2, "ddp", train__epochs=200)
    with running(copy) as launcher:
        ranks = processes_of(launcher, copy)
        assert len(ranks) == 2
        (ranks[1] if victim == "rank" else psutil.Process(launcher.pid)).send_signal(signal.SIGKILL)
        _, alive = psutil.wait_procs(ranks, timeout=ENDS_SECONDS)
        assert not alive
        launcher.wait(ENDS_SECONDS)
    said = said_by(launcher)
    if victim == "rank":
        assert launcher.returncode == 1 and len(said.splitlines()) == 1
        assert "ended by SIGKILL" in said
