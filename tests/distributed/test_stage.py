"""`python -m stages.train` on several processes, as a user runs it: same curve, complete outputs, one error."""

import json
import re
import shutil
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from stages.train import main as train
from tests.distributed.launched import curve, errors_of, made_a_step, only_error_of, planned, running
from tests.processes import wait_for
from tests.workspace import invoke, run_module, write_verdict

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

STEPS = 6
LOSS = 1e-5
ENDS_SECONDS = 30
"""Seconds within which all processes of a run have exited after one of them was killed."""


def train_alone(root: Path, **values: object) -> Path:
    """A run in this process; the directory to which its outputs were moved."""
    planned(root, 1, "none", **values)
    assert invoke(train).exit_code == 0
    for output in ("data/train", "data/tuned"):
        shutil.move(root / output, root / "alone" / output)
    return root / "alone"


def assert_same_learning(found: Path, alone: Path) -> None:
    """Losses of every step, held-out losses, and the content of the outputs."""
    ours, theirs = curve(found), curve(alone)
    assert len(ours) == len(theirs) >= STEPS
    for a, b in zip(ours, theirs, strict=True):
        for column in ("loss", "heldout_loss"):
            assert bool(a[column]) == bool(b[column])
            assert float(a[column] or 0) == pytest.approx(float(b[column] or 0), abs=LOSS)
        assert all(a[key] == b[key] for key in ("tokens", "supervised_tokens", "lr"))
    assert_same_weights(found, alone)


def assert_same_weights(found: Path, alone: Path) -> None:
    """Tensors that differ by rounding alone, and equal other files."""
    for file in sorted((alone / "data/tuned").iterdir()):
        other = found / "data/tuned" / file.name
        if file.suffix != ".safetensors":
            assert other.read_bytes() == file.read_bytes(), file.name
            continue
        tensors, expected = load_file(other), load_file(file)
        assert tensors.keys() == expected.keys()
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # From plain peft.
def test_two_processes_write_what_one_writes(copy: Path, tiny_dir: Path):
    """zero3 on 4-bit weights with packed rows: the adapter is gathered, and fits the model in plain peft."""
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


def test_two_processes_keep_the_best_weights_that_one_keeps(copy: Path):
    """Each has a part of the best checkpoint's weights; a rate that is too high makes later ones worse."""
    best: dict[str, object] = {"train__keep": "best", "train__heldout_every_steps": 1, "train__lr": 0.05}
    best |= {"train__stop_after_no_gain": 4, "train__schedule": "constant"}
    alone = train_alone(copy, **best)
    planned(copy, 2, "zero3", **best)
    run_module("stages.train", cwd=copy, check=True)
    assert_same_weights(copy, alone)
    ours, theirs = (json.loads((root / "data/train/figures.json").read_text()) for root in (copy, alone))
    for figure in ("kept_step", "stopped_after_step"):
        assert ours[figure] == theirs[figure]
    assert ours["kept_step"] < ours["stopped_after_step"]


@pytest.mark.parametrize("mode", ["bucketed", "packed"])
def test_processes_that_divide_each_row_write_what_one_writes(copy: Path, mode: str):
    """Held-out rows, or rows of an odd length, of which a process has no part; a plan for as many rows as processes."""
    alone = train_alone(copy, bucket__mode=mode)
    planned(copy, 4, "zero3", train__context_parallel=2, bucket__mode=mode, bucket__pad_multiple=1)
    assert run_module("stages.train", cwd=copy, check=True).stderr == ""
    assert_same_learning(copy, alone)


@pytest.mark.parametrize(
    ("gpus", "sharding", "method"), [(2, "none", "full"), (4, "zero3", "full"), (2, "none", "qlora")]
)
def test_processes_with_parts_of_weights_write_what_one_writes(copy: Path, gpus: int, sharding: str, method: str):
    """Parts of a process in data/tuned, a held-out loss of some tokens, or dropout that differs between processes."""
    lr = {"train__lr": 1e-3} if method == "full" else {}
    alone = train_alone(copy, train__method=method, **lr)
    planned(copy, gpus, sharding, train__tensor_parallel=2)
    assert run_module("stages.train", cwd=copy, check=True).stderr == ""
    assert_same_learning(copy, alone)


@pytest.mark.parametrize("sharding", ["zero1", "zero2"])
def test_two_processes_write_a_full_model(copy: Path, sharding: str):
    """Shards instead of weights in data/tuned."""
    alone = train_alone(copy, train__method="full", train__lr=1e-3)
    planned(copy, 2, sharding)
    run_module("stages.train", cwd=copy, check=True)
    assert_same_learning(copy, alone)
    loaded = AutoModelForCausalLM.from_pretrained(copy / "data/tuned", dtype=torch.float32)
    assert all(torch.isfinite(parameter).all() for parameter in loaded.parameters())


@pytest.mark.parametrize("method", ["full", "qlora"])
def test_a_pipeline_writes_what_one_process_writes(copy: Path, method: str):
    """The other stage's layers missing in data/tuned, and its shapes and layers wrong in the figures of the run."""
    alone = train_alone(copy, train__method=method, train__lr=1e-3)
    planned(copy, 2, "none", train__pipeline_stages=2)
    write_verdict(copy, stage_layers=[1, 3])
    run_module("stages.train", cwd=copy, check=True)
    assert_same_learning(copy, alone)
    figures = [json.loads((root / "data/train/figures.json").read_text()) for root in (copy, alone)]
    assert figures[0]["trained_parameters"] == figures[1]["trained_parameters"]


def test_a_user_error_is_printed_once(copy: Path):
    """Every process raises it; a user needs one line."""
    planned(copy, 2, "zero3", train__lr=1e30)
    done = run_module("stages.train", cwd=copy)
    assert done.returncode == 1 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("error: train.lr: ")


def processes_of(launcher: subprocess.Popen[bytes], root: Path) -> list[psutil.Process]:
    """The processes of a run that has made a step."""
    wait_for(lambda: made_a_step(root), launcher)
    return psutil.Process(launcher.pid).children(recursive=True)


def test_a_signal_ends_all_with_one_line(copy: Path):
    """Each process would print it, and the others' end."""
    planned(copy, 2, "ddp", train__epochs=200)
    with running(copy) as launcher:
        ranks = processes_of(launcher, copy)
        launcher.send_signal(signal.SIGTERM)
        launcher.wait(ENDS_SECONDS)
        assert not psutil.wait_procs(ranks, timeout=ENDS_SECONDS)[1]
    acknowledged, line = errors_of(copy)
    assert acknowledged.startswith("train: SIGTERM: stopping after this step, ") and "again to stop now" in acknowledged
    assert launcher.returncode == 128 + signal.SIGTERM
    assert line.startswith("train: stopped by SIGTERM")


def test_a_signal_to_one_process_stops_all_in_order(copy: Path):
    """A user kills a process from a list of processes."""
    planned(copy, 2, "zero3", train__epochs=200)
    with running(copy) as launcher:
        ranks = processes_of(launcher, copy)
        ranks[1].send_signal(signal.SIGTERM)
        launcher.wait(ENDS_SECONDS)
    line = only_error_of(copy)
    assert launcher.returncode == 128 + signal.SIGTERM
    assert re.fullmatch(r"train: stopped by SIGTERM; the checkpoint of optimizer step \d+ is kept: .*", line)


@pytest.mark.parametrize("victim", ["rank", "launcher"])
def test_nothing_outlives_a_killed_process(copy: Path, victim: str):
    """An orphan would keep its GPU's memory until someone finds it."""
    planned(copy, 2, "ddp", train__epochs=200)
    with running(copy) as launcher:
        ranks = processes_of(launcher, copy)
        assert len(ranks) == 2
        (ranks[1] if victim == "rank" else psutil.Process(launcher.pid)).send_signal(signal.SIGKILL)
        _, alive = psutil.wait_procs(ranks, timeout=ENDS_SECONDS)
        assert not alive
        launcher.wait(ENDS_SECONDS)
    if victim == "rank":
        line = only_error_of(copy)
        assert launcher.returncode == 1 and "ended by SIGKILL" in line
