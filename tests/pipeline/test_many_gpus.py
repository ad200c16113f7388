"""Two processes on a CPU through DVC: in the workspace, in a temporary copy, and queued."""

import csv
import json
import re
from typing import Any

import pytest

from tests.pipeline.clone import Clone, is_up_to_date, stages_run
from tests.pipeline.queue import run_queued

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

LOSS = 1e-5
"""Largest difference of a loss from that of one process."""
EXACT = 2e-6
"""The same in fp32 without dropout, for the eight steps of this run: 1.3e-6 with AVX2, under 1e-6 with AVX-512."""
CHANGED = ["bucket", "estimate", "train", "evaluate", "report"]
MODES: dict[str, tuple[int, dict[str, object]]] = {
    "ddp": (2, {"train.sharding": "ddp"}),
    "zero1": (2, {"train.sharding": "zero1"}),
    "zero2": (2, {"train.sharding": "zero2"}),
    "zero3": (2, {"train.sharding": "zero3"}),
    "hsdp": (4, {"train.sharding": "hsdp", "train.shard_group_gpus": 2}),
    "pp": (2, {"train.pipeline_stages": 2}),
    "tp": (2, {"train.tensor_parallel": 2}),
    "cp": (2, {"train.sharding": "ddp", "train.context_parallel": 2}),
    "tp x zero3": (4, {"train.sharding": "zero3", "train.tensor_parallel": 2}),
    "cp x zero3": (4, {"train.sharding": "zero3", "train.context_parallel": 2}),
}
"""GPUs, and the parameters that start each way to share a run."""


def shared(sharding: str) -> list[str]:
    """Arguments of `dvc exp run`."""
    return ["-S", "hardware.num_gpus=2", "-S", f"train.sharding={sharding}"]


def check(text: str, alone: Any) -> None:
    """Compare the metrics of two processes with those of one."""
    found = json.loads(text)
    assert "the largest of 2 processes" in found["peak_measured_how"]
    assert len(found["peak_bytes_measured_by_rank"]) == 2
    assert max(found["peak_bytes_measured_by_rank"]) <= found["peak_bytes_measured"]
    for name in ("train_loss", "heldout_loss_last"):
        assert found[name] == pytest.approx(alone[name], abs=LOSS)
    assert found["trained_parameters"] == alone["trained_parameters"]


def curve(clone: Clone) -> list[float]:
    with open(clone.root / "data/train/curves.csv", newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def test_two_processes_run_under_dvc(clone: Clone):
    """The launcher must start in a copy too, and the report must show both GPUs."""
    alone, losses = clone.json("data/train/figures.json"), curve(clone)
    tuned_loss = clone.json("metrics/evaluate.json")["tuned_loss"]
    clone.set_params(hardware__num_gpus=2, train__sharding="zero3")
    assert stages_run(clone.dvc("repro")) == CHANGED
    assert curve(clone) == pytest.approx(losses, abs=LOSS)
    check((clone.root / "data/train/figures.json").read_text(), alone)
    page = (clone.root / "data/report/report.md").read_text()
    for text in ("| hardware.num_gpus | 2 |", "| waiting | ", "Measured peak of each of 2 processes: "):
        assert text in page
    assert is_up_to_date(clone)
    clone.back_to_baseline()

    # The batches of two processes are cached now, and equal in every mode. Equal weights have a cached evaluation too.
    ran = stages_run(clone.dvc("exp", "run", "--temp", "-n", "copied", *shared("ddp")))
    assert [stage for stage in ran if stage != "evaluate"] == ["estimate", "train", "report"]
    run_queued(clone, {"queued": shared("zero2")})
    for name in ("copied", "queued"):
        revision = clone.run("git", "for-each-ref", "--format=%(objectname)", f"refs/exps/**/{name}").strip()
        found = json.loads(clone.run("git", "show", f"{revision}:metrics/evaluate.json"))
        assert found["tuned_loss"] == pytest.approx(tuned_loss, abs=LOSS)
        # The checkpoint of the run before, in another mode, is still there.
        trained = json.loads(clone.run("git", "show", f"{revision}:metrics/train.json"))
        assert trained["peak_gib_measured"] > 0
    assert all((path.parent / "finished").exists() for path in (clone.root / "scratch/train").glob("*/step-*"))


@pytest.mark.parametrize("mode", MODES)
def test_parameters_alone_start_every_mode(clone: Clone, mode: str):
    """A parameter that no stage reads, layers that estimate and train divide differently, or tokens made anew."""
    losses, tuned_loss = curve(clone), clone.json("metrics/evaluate.json")["tuned_loss"]
    gpus, parameters = MODES[mode]
    given = {"hardware.num_gpus": gpus, **parameters}.items()
    output = clone.dvc("exp", "run", *(word for key, value in given for word in ("-S", f"{key}={value}")), "evaluate")
    # The test above has run some of these modes. Equal plans and weights change no later stage.
    changed = set(re.findall(r"^(?:Running stage|Stage) '(\w+)'(?::| is cached)", output, re.MULTILINE))
    assert {"estimate", "train"} <= changed <= set(CHANGED[:-1])
    assert curve(clone) == pytest.approx(losses, abs=EXACT)
    assert clone.json("metrics/evaluate.json")["tuned_loss"] == pytest.approx(tuned_loss, abs=EXACT)
    found = clone.json("data/train/figures.json")
    assert len(found["peak_bytes_measured_by_rank"]) == gpus
    assert ("stage_layers" in clone.json("data/estimate/verdict.json")) == (mode == "pp")
