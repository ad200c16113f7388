"""The stage as a user runs it: what it writes, and one line for each fault."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig

from lean_finetune.config.schema import Bucket
from lean_finetune.core.atomic_files import sha256_file
from lean_finetune.core.units import GIB
from lean_finetune.memory.advice.one_change_sweep import halving_flag
from lean_finetune.plan.batch_plan import MicroBatch, Plan, write_plan
from stages.estimate import main
from tests.memory.common import card_for, plan_of
from tests.token_files import write_index
from tests.workspace import error, invoke, lay_out

PLAN = plan_of([[(2, 128, 60), (3, 80, 40)], [(4, 64, 90)]])
LENGTHS = (64, 64, 40, 40)


@pytest.fixture
def workspace(tmp_path: Path, small_llama: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a plan and a pinned small model."""
    lay_out(tmp_path, hardware__gpu="24GiB", data__max_length=128, bucket__max_tokens=256)
    write_plan(tmp_path / "plan.arrow", [PLAN])
    write_index(tmp_path / "train-index.arrow", [([3] * length, [1, length], None) for length in LENGTHS])
    pin(tmp_path, small_llama)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def pin(workspace: Path, model: Path) -> None:
    """Have a directory's model be the one that is estimated."""
    lock: dict[str, Any] = {"kind": "directory", "name": str(model), "revision": None, "tokenizer_files": []}
    lock["files"] = {"config.json": sha256_file(model / "config.json")}
    (workspace / "model.json").write_text(json.dumps(lock))


def run(**options: str):
    files = {"plan": "plan.arrow", "index": "train-index.arrow", "model-lock": "model.json"}
    defaults = {**files, "out": "estimate", "metrics": "estimate.json"}
    arguments = [part for key, value in {**defaults, **options}.items() for part in (f"--{key}", value)]
    return invoke(main, *arguments)


def read(directory: Path):
    verdict = json.loads((directory / "estimate" / "verdict.json").read_text())
    breakdown = json.loads((directory / "estimate" / "breakdown.json").read_text())
    switches = list(csv.DictReader((directory / "estimate" / "switches.csv").read_text().splitlines()))
    return verdict, breakdown, switches, json.loads((directory / "estimate" / "figures.json").read_text())


def advice(directory: Path):
    return json.loads((directory / "estimate" / "advice.json").read_text())


def test_a_run_that_fits_is_told_to_fit_with_where_its_bytes_are(workspace):
    """Files that disagree with each other."""
    assert run().exit_code == 0
    verdict, breakdown, switches, metrics = read(workspace)
    assert verdict == {"enforce": True, "refusal": None}
    assert sum(breakdown["peak"].values()) == metrics["peak_bytes_predicted"]
    steps, others = {"forward", "backward", "clip", "optimizer"}, {"load", "heldout", "save", "evaluate", "generate"}
    assert set(breakdown) == steps | others | {"peak"}
    explanation = json.loads((workspace / "estimate" / "explanation.json").read_text())
    assert explanation["peak_bytes"] == metrics["peak_bytes_predicted"]
    tiers = json.loads((workspace / "estimate" / "tiers.json").read_text())
    assert (
        metrics["peak_bytes_predicted"] <= tiers["expandable"]["reserved_bytes"] <= metrics["process_bytes_predicted"]
    )
    for kind, found in tiers.items():
        assert found["reserved_bytes"] == metrics[f"reserved_bytes_predicted_{kind}"], "the whole plan's, everywhere"
    assert metrics["process_bytes_predicted"] == tiers["expandable"]["process_bytes"]
    process = json.loads((workspace / "estimate" / "process.json").read_text())
    assert tiers["native"]["process_margin_bytes"] == process["device"]["cuda_context"]["margin_bytes"]
    assert metrics["host_bytes_predicted"] == process["host_needed_bytes"]
    assert process["device"]["cuda_context"]["basis"] == "assumed" and process["device"]["nccl"]["bytes"] == 0
    reserved = list(csv.DictReader((workspace / "estimate" / "reserved.csv").read_text().splitlines()))
    assert metrics["reserved_replayed"] == "all 2 steps replayed" and [row["step"] for row in reserved] == ["0", "1"]
    assert max(float(row["reserved_gib"]) for row in reserved) * GIB == pytest.approx(
        metrics["reserved_bytes_predicted_native"], abs=1024
    )
    assert metrics["predicted_by_phase"] == {
        phase: sum(parts.values()) for phase, parts in breakdown.items() if phase != "peak"
    }
    assert metrics["predicted_by_phase"][metrics["worst_phase"]] == metrics["peak_bytes_predicted"]
    assert switches[0]["switch"] == "current"
    assert float(switches[0]["peak_gib"]) == pytest.approx(metrics["peak_gib_predicted"], abs=1e-4)
    labels = [switch["switch"].partition("=")[0] for switch in switches[1:]]
    assert labels == ["max_tokens", "grad_ckpt", "loss_chunk", "optimizer", "precision", "method", "method"]
    assert metrics["gpu"] == "24GiB" and metrics["capacity_gib"] == 24.0
    assert metrics["verdict"] == "fits" and metrics["layers_traced"] == "all 2 layers: they are few"
    written = advice(workspace)
    changes = {one["command"]: one["peak_bytes"] for one in written.pop("single_changes")}
    assert written == {"verdict": "fits", "ranked": None, "remedies": []}
    assert len(changes) == len(switches) - 1 and min(changes.values()) < metrics["peak_bytes_predicted"]
    assert all(command.startswith("dvc exp run -S ") for command in changes)
    inverse = json.loads((workspace / "estimate" / "what_fits.json").read_text())
    assert inverse["smallest_gpu"] == "P4"
    assert inverse["longest_row"] == {"value": 256, "limit": "the model's 256 positions"}


@pytest.mark.parametrize("enforce", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_run_that_does_not_fit_ends_the_stage_well_and_says_what_would(workspace, enforce):
    """A DVC pipeline that breaks in estimate, a refusal that train never sees, or one that enforce=false overrides."""
    rows = 256
    write_plan(workspace / "plan.arrow", [plan_of([[(rows, 128, 90)]])])
    write_index(workspace / "train-index.arrow", [([3] * 128, [1, 128], None)] * rows)
    limits = {"bucket__max_tokens": rows * 128, "train__tokens_per_step": rows * 128}
    lay_out(workspace, hardware__gpu="0.7GiB", train__method="full", estimate__enforce=enforce, **limits)
    result = run()
    assert result.exit_code == 0
    verdict, _, _, metrics = read(workspace)
    assert verdict["enforce"] is enforce and not metrics["fits"]
    told_first, *_, told_last = result.stderr.strip().splitlines()
    assert told_first.startswith("does not fit 0.7GiB: "), "the verdict comes before the search"
    assert told_last.startswith("does not fit: hardware.gpu: predicted peak ")
    assert " usable on 0.7GiB (0.7 GiB less 525 MiB for a CUDA context" in told_last
    assert verdict["refusal"] == (told_last.removeprefix("does not fit: ") if enforce else None)
    remedies = advice(workspace)["remedies"]
    table = list(csv.DictReader((workspace / "estimate" / "advice.csv").read_text().splitlines()))
    assert [row["command"] for row in table] == [remedy["command"] for remedy in remedies]
    assert all(remedy["command"].removeprefix("dvc exp run ") in told_last for remedy in remedies[:3])
    assert remedies


@pytest.mark.slow
def test_looking_at_another_gpu_changes_no_byte_of_the_verdict(workspace):
    """Dvc exp run -S hardware.gpu=… retrains although both fit."""
    texts = []
    for gpu in ("RTX-3090", "T4"):
        lay_out(workspace, hardware__gpu=gpu)
        assert run().exit_code == 0
        texts.append((workspace / "estimate" / "verdict.json").read_bytes())
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_activations_on_the_host_are_counted_there(workspace):
    """Offloaded activations missing from the host's figure."""
    found = {}
    for where in ("none", "cpu"):
        lay_out(workspace, hardware__gpu="24GiB", train__offload_activations=where)
        result = run()
        assert result.exit_code == 0, result.output
        found[where] = read(workspace)[3]
        assert found[where]["reserved_replayed"].startswith("all 2 steps")
    away = found["cpu"]["offloaded_bytes_predicted"]
    assert found["none"]["offloaded_bytes_predicted"] == 0 < away
    host = json.loads((workspace / "estimate" / "process.json").read_text())["host"]
    assert host["activations"]["bytes"] == away
    assert found["cpu"]["host_bytes_predicted"] >= host["process"]["bytes"] + host["batches"]["bytes"] + away
    assert found["cpu"]["peak_bytes_predicted"] < found["none"]["peak_bytes_predicted"]
    lay_out(workspace, train__offload_activations="cpu", hardware__gpu="auto")
    assert error(run()).startswith("train.offload_activations: cpu takes activations off a GPU; got cpu where training")


@pytest.mark.slow
def test_an_optimizer_on_the_host_is_counted_there(workspace):
    """Offloaded optimizer state missing from the host's figure."""
    found = {}
    for where in ("none", "optimizer"):
        lay_out(workspace, hardware__gpu="24GiB", train__method="full", train__offload=where)
        result = run()
        assert result.exit_code == 0, result.output
        found[where] = read(workspace)[3]
        assert found[where]["reserved_replayed"].startswith("all 2 steps")
    states = json.loads((workspace / "estimate" / "explanation.json").read_text())["states"]
    there = [line["bytes"] for line in states if line["category"] == "host_optimizer"]
    more = found["optimizer"]["host_bytes_predicted"] - found["none"]["host_bytes_predicted"]
    assert 0 < more <= sum(there)  # Told in the device's blocks there.
    assert found["optimizer"]["peak_bytes_predicted"] < found["none"]["peak_bytes_predicted"]
    lay_out(workspace, train__offload="optimizer", hardware__gpu="auto")
    assert error(run()).startswith("train.offload: optimizer takes its state off a GPU; got optimizer where training")


def test_updates_in_backward_need_steps_of_one_micro_batch(workspace):
    """A step whose second micro-batch would update what the first one has updated."""
    lay_out(workspace, train__method="full", train__optimizer_in_backward=True, train__max_grad_norm=None)
    assert error(run()).startswith("train.optimizer_in_backward: every optimizer step must be one micro-batch; step ")


def test_an_unknown_gpu_is_one_line_and_leaves_nothing_behind(workspace):
    """A directory half written, or a traceback."""
    lay_out(workspace, hardware__gpu="RTX-409")
    assert error(run()).startswith("hardware.gpu: must be auto, a size such as 24GiB or a known GPU; got 'RTX-409'")
    assert not (workspace / "estimate").exists() and not (workspace / "estimate.json").exists()


def test_bf16_on_a_t4_is_one_line(workspace):
    """A precision the card cannot compute accepted."""
    lay_out(workspace, hardware__gpu="T4", train__precision="bf16")
    line = error(run())
    assert line.startswith("train.precision: bf16 needs compute capability 8.0 (Ampere) or later; got bf16 for T4; ")
    assert "set train.precision to fp16" in line


@pytest.mark.parametrize(
    ("mode", "rows", "tokens", "label"),
    [
        ("bucketed", 8, 256, "max_tokens=128"),
        ("bucketed", 8, 200, None),
        ("packed", 8, 256, "max_tokens=128"),
        ("fixed", 8, 200, "fixed_rows=4"),
        ("fixed", 1, 256, None),
    ],
)
def test_the_remedy_of_smaller_batches_is_the_one_that_works_in_this_mode(mode, rows, tokens, label):
    """A refused run advised to lower bucket.max_tokens, which bounds nothing in mode fixed."""
    bucket = Bucket(mode=mode, max_tokens=tokens, pad_multiple=8, constant_shape=False, fixed_rows=rows)
    assert halving_flag(bucket, 128) == (None if label is None else f"bucket.{label}")


@pytest.mark.parametrize(("gpu", "precision"), [("T4", "fp16"), ("24GiB", None)])
@pytest.mark.slow
def test_auto_precision_is_chosen_said_and_passed_on(workspace, gpu, precision):
    """Train and evaluate must compute in the type that was predicted, whatever the machine they run on."""
    lay_out(workspace, hardware__gpu=gpu, train__precision="auto", train__method="lora")
    done = run()
    assert done.exit_code == 0, done.output
    chosen = json.loads((workspace / "estimate/verdict.json").read_text())["precision"]
    assert chosen == (precision or "bf16") and f"train.precision: auto is {chosen}: " in done.output


SHARED_PLAN = Plan.of(
    [
        MicroBatch(epoch=0, step=0, rows=np.arange(2), length=128, supervised=60, rank=0, flat=False),
        MicroBatch(epoch=0, step=0, rows=np.arange(3), length=80, supervised=40, rank=1, flat=False),
    ],
    ranks=2,
)


@pytest.mark.slow
def test_a_run_on_several_gpus_is_judged_per_gpu(workspace):
    """Weights of all GPUs counted on each, the larger batch of another GPU missed, or one process on the host."""
    write_plan(workspace / "plan.arrow", [SHARED_PLAN])
    found = {}
    for mode in ("ddp", "zero3"):
        lay_out(workspace, hardware__gpu="24GiB", hardware__num_gpus=2, train__sharding=mode, train__method="full")
        assert run().exit_code == 0
        found[mode] = read(workspace)
    (_, ddp, _, metrics), (_, zero3, _, less) = found["ddp"], found["zero3"]
    assert ddp["clip"]["weights"] / zero3["clip"]["weights"] == pytest.approx(2, rel=0.05)
    assert ddp["clip"]["optimizer"] / zero3["clip"]["optimizer"] == pytest.approx(2, rel=0.05)
    assert (
        not ddp["forward"].get("sharding") and zero3["forward"]["sharding"]
    )  # Whole layers; gradients wait in no bucket.
    assert less["predicted_by_phase"]["clip"] < metrics["predicted_by_phase"]["clip"]
    assert "several GPUs" in metrics["reserved_replayed"]
    process = json.loads((workspace / "estimate" / "process.json").read_text())
    assert process["device"]["nccl"]["basis"] == "assumed" and process["processes_per_host"] == 2
    assert process["host"]["model"]["bytes"] > 0
    assert less["host_bytes_predicted"] >= 2 * process["host"]["process"]["bytes"] + process["host"]["model"]["bytes"]


@pytest.mark.slow
def test_a_sharding_mode_that_needs_less_memory_is_offered(workspace, tmp_path):
    """Advice that lowers quality where the other GPUs have room."""
    write_plan(workspace / "plan.arrow", [SHARED_PLAN])
    (tmp_path / "large").mkdir()
    sizes: dict[str, Any] = {
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
    }
    LlamaConfig(**sizes, vocab_size=256, max_position_embeddings=256).save_pretrained(tmp_path / "large")
    pin(workspace, tmp_path / "large")
    values = {"hardware__num_gpus": 2, "train__sharding": "ddp", "train__method": "full", "train__grad_ckpt": True}
    values |= {"data__max_length": 128, "bucket__max_tokens": 256}
    lay_out(workspace, hardware__gpu="24GiB", **values)
    assert run().exit_code == 0
    peak = read(workspace)[3]["peak_bytes_predicted"]
    lay_out(workspace, hardware__gpu=card_for(0.99 * peak), **values)
    assert run().exit_code == 0
    assert any("train.sharding=" in remedy["command"] for remedy in advice(workspace)["remedies"])
