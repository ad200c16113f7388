"""The stage as a user runs it: what it writes, and one line for each fault."""

import csv
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from ruamel.yaml import YAML

from cuda_memory.units import GIB
from lean_finetune.config import load
from lean_finetune.config.schema import Bucket, Lora, Quant, Train
from lean_finetune.config.section import Section
from lean_finetune.core.atomic_files import read_json, read_sealed
from lean_finetune.core.errors import UserError
from lean_finetune.memory.advice import estimate_run
from lean_finetune.memory.advice.search_space import part_of_bucket
from lean_finetune.memory.switches.switch import flags_of
from lean_finetune.plan.batch_plan import Plan, write_plan
from stages.estimate import main
from tests.conftest import ROOT
from tests.kit.estimate_cpu import save_small
from tests.memory.common import card_for, llama, micro_batch, pin, plan_of
from tests.token_files import write_index
from tests.workspace import error, invoke, lay_out

PLAN = plan_of([[(2, 128, 60), (3, 80, 40)], [(4, 64, 90)]])
LENGTHS = (64, 64, 40, 40)


def laid_out(directory: Path, model: Path) -> Path:
    """A directory with a plan and a pinned model."""
    lay_out(directory, hardware__gpu="24GiB", data__max_length=128, bucket__max_tokens=256)
    write_plan(directory / "plan.arrow", [PLAN])
    for name in ("train-index", "heldout-index"):
        write_index(directory / f"{name}.arrow", [([3] * length, [1, length], None) for length in LENGTHS])
    pin(directory, model)
    return directory


@pytest.fixture
def workspace(tmp_path: Path, small_llama: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a plan and a pinned small model."""
    monkeypatch.chdir(tmp_path)
    return laid_out(tmp_path, small_llama)


@pytest.fixture(scope="module")
def fitting(tmp_path_factory: pytest.TempPathFactory, small_llama: Path) -> Path:
    """The directory of a run that fits, with what the stage wrote."""
    directory = laid_out(tmp_path_factory.mktemp("fitting"), small_llama)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        assert run().exit_code == 0
    return directory


def run(**options: str):
    files = {"plan": "plan.arrow", "index": "train-index.arrow", "heldout-index": "heldout-index.arrow"}
    defaults = {**files, "model-lock": "model.json", "out": "estimate", "metrics": "estimate.json"}
    arguments = [part for key, value in {**defaults, **options}.items() for part in (f"--{key}", value)]
    return invoke(main, *arguments)


def result(workspace: Path, name: str) -> Any:
    path = workspace / "estimate" / f"{name}.json"
    return read_json(path) if name in ("tiers", "process", "what_fits") else read_sealed(path)


def table(workspace: Path, name: str) -> list[dict[str, str]]:
    return list(csv.DictReader((workspace / "estimate" / f"{name}.csv").read_text().splitlines()))


def estimated(workspace: Path, **values: Any) -> dict[str, Any]:
    """The figures of the workspace's run with these parameters."""
    lay_out(workspace, **{"hardware__gpu": "24GiB", **values})
    done = run()
    assert done.exit_code == 0, done.output
    return result(workspace, "figures")


def test_answers_without_a_limit_are_predicted_for_the_longest_one_of_held_out_rows(workspace, monkeypatch):
    """Stage evaluate generated more tokens than were predicted."""
    monkeypatch.setattr(estimate_run, "sweep_switches", lambda *args, **options: [])
    write_index(workspace / "heldout-index.arrow", [([3] * 64, [64 - n, 64], None) for n in (8, 21, 13)])
    peaks = []
    for tokens in (None, 21, 8):
        lay_out(workspace, data__max_length=128, bucket__max_tokens=2048, evaluate__max_new_tokens=tokens)
        assert run().exit_code == 0
        peaks.append(result(workspace, "figures")["predicted_by_phase"]["generate"])
    assert peaks[0] == peaks[1] != peaks[2]


def test_the_results_of_a_run_that_fits_agree(fitting):
    """Files that disagree with each other."""
    metrics, breakdown, tiers, process = (
        result(fitting, name) for name in ("figures", "breakdown", "tiers", "process")
    )
    peak_bytes = metrics["peak_bytes_predicted"]
    assert result(fitting, "verdict") == {"enforce": True, "refusal": None} and metrics["verdict"] == "fits"
    assert sum(breakdown["peak"].values()) == peak_bytes == result(fitting, "explanation")["peak_bytes"]
    by_phase = {phase: sum(parts.values()) for phase, parts in breakdown.items() if phase != "peak"}
    assert metrics["predicted_by_phase"] == by_phase and by_phase[metrics["worst_phase"]] == peak_bytes
    steps, others = {"forward", "backward", "clip", "optimizer"}, {"load", "heldout", "save", "evaluate", "generate"}
    assert set(by_phase) == steps | others
    assert peak_bytes <= tiers["expandable"]["reserved_bytes"] <= metrics["process_bytes_predicted"]
    for kind, found in tiers.items():
        assert found["reserved_bytes"] == metrics[f"reserved_bytes_predicted_{kind}"]
    assert metrics["process_bytes_predicted"] == tiers["expandable"]["process_bytes"]
    assert tiers["native"]["process_margin_bytes"] == process["device"]["cuda_context"]["margin_bytes"]
    assert metrics["host_bytes_predicted"] == process["host_needed_bytes"] and process["device"]["nccl"]["bytes"] == 0
    reserved = table(fitting, "reserved")
    assert metrics["deciding_tier"] == "reserved"
    assert metrics["reserved_replayed"] == "all 2 steps replayed" and [row["step"] for row in reserved] == ["0", "1"]
    highest = max(float(row["reserved_gib"]) for row in reserved) * GIB
    assert highest == pytest.approx(metrics["reserved_bytes_predicted_native"], abs=1024)
    assert metrics["gpu"] == "24GiB" and metrics["capacity_gib"] == 24.0
    assert metrics["layers_traced"] == "all 2 layers: they are few"


def test_the_advice_for_a_run_that_fits_is_each_single_change(fitting):
    peak_bytes, switches, written = (
        result(fitting, "figures")["peak_bytes_predicted"],
        table(fitting, "switches"),
        result(fitting, "advice"),
    )
    assert switches[0]["switch"] == "current"
    assert float(switches[0]["peak_gib"]) == pytest.approx(peak_bytes / GIB, abs=1e-4)
    labels = [switch["switch"].partition("=")[0] for switch in switches[1:]]
    of_activations = ["grad_ckpt", "fused_kernels", "sequence_tiles", "compress_activations"]
    changed = ["max_tokens", *of_activations, "loss_chunk", "optimizer", "offload", "precision", "method", "method"]
    assert labels == changed
    changes = {one["command"]: one["peak_bytes"] for one in written.pop("single_changes")}
    assert written == {"verdict": "fits", "ranked": None, "remedies": []}
    assert len(changes) == len(switches) - 1 and min(changes.values()) < peak_bytes
    assert all(command.startswith("dvc exp run -S ") for command in changes)
    inverse = result(fitting, "what_fits")
    assert inverse["smallest_gpu"] == "P4"
    assert inverse["longest_row"] == {"value": 256, "limit": "the model's 256 positions"}


def test_a_host_with_too_little_memory_is_named_before_the_search(workspace, monkeypatch):
    """`does not fit: 0.1 of 24 GiB usable`, where the host's RAM is what is missing."""
    monkeypatch.setattr(estimate_run, "answer", stopped := Mock(side_effect=UserError("searched")))
    lay_out(workspace, hardware__gpu="24GiB", hardware__host_ram_gib=0.01)
    done = run()
    assert stopped.called
    first = done.stderr.strip().splitlines()[0]
    assert first.startswith("does not fit on 24GiB: hardware.host_ram_gib: the run needs ")


@pytest.mark.parametrize("enforce", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_run_that_does_not_fit_is_refused_with_advice(workspace, enforce):
    """A DVC pipeline that breaks in estimate, a refusal that train never sees, or one that enforce=false overrides."""
    rows = 256
    write_plan(workspace / "plan.arrow", [plan_of([[(rows, 128, 90)]])])
    write_index(workspace / "train-index.arrow", [([3] * 128, [1, 128], None)] * rows)
    limits = {"bucket__max_tokens": rows * 128, "train__tokens_per_step": rows * 128}
    lay_out(workspace, hardware__gpu="0.7GiB", train__method="full", estimate__enforce=enforce, **limits)
    done = run()
    assert done.exit_code == 0
    first, *_, last = done.stderr.strip().splitlines()
    assert first.startswith("does not fit on 0.7GiB: "), "the verdict comes before the search"
    assert last.startswith("does not fit: hardware.gpu: predicted peak ")
    assert " usable on 0.7GiB (0.7 GiB less 525 MiB for a CUDA context" in last
    refusal = last.removeprefix("does not fit: ") if enforce else None
    assert result(workspace, "verdict") == {"enforce": enforce, "refusal": refusal}
    assert not result(workspace, "figures")["fits"]
    remedies = result(workspace, "advice")["remedies"]
    assert [row["command"] for row in table(workspace, "advice")] == [remedy["command"] for remedy in remedies]
    assert remedies and all(remedy["command"].removeprefix("dvc exp run ") in last for remedy in remedies[:3])


@pytest.mark.slow
def test_the_verdict_is_the_same_on_another_gpu_that_fits(workspace):
    """Dvc exp run -S hardware.gpu=… retrains although both fit."""
    texts = []
    for gpu in ("RTX-3090", "T4"):
        estimated(workspace, hardware__gpu=gpu)
        texts.append((workspace / "estimate" / "verdict.json").read_bytes())
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_offloaded_memory_is_counted_on_the_host(workspace):
    """Offloaded activations or optimizer state missing from the host's figure, or counted on the device."""
    stay = estimated(workspace, train__method="full")
    activations = estimated(workspace, train__method="full", train__offload_activations="cpu")
    offloaded = activations["offloaded_bytes_predicted"]
    assert result(workspace, "process")["host"]["activations"]["bytes"] == offloaded > 0
    optimizer = estimated(workspace, train__method="full", train__offload="optimizer")
    states = result(workspace, "explanation")["states"]
    state_bytes = sum(line["bytes"] for line in states if line["category"] == "host_optimizer")
    for found, size in ((activations, offloaded), (optimizer, state_bytes)):
        assert 0 < found["host_bytes_predicted"] - stay["host_bytes_predicted"] <= size
        assert found["peak_bytes_predicted"] < stay["peak_bytes_predicted"]
        assert found["reserved_replayed"].startswith("all 2 steps")
    for key, value in (("offload_activations", "cpu"), ("offload", "optimizer")):
        lay_out(workspace, hardware__gpu="auto", train__method="full", **{f"train__{key}": value})
        assert error(run()).startswith(f"train.{key}: {value} takes ")


def test_updates_in_backward_need_steps_of_one_micro_batch(workspace):
    """A step whose second micro-batch would update what the first one has updated."""
    lay_out(workspace, train__method="full", train__optimizer_in_backward=True, train__max_grad_norm=None)
    assert error(run()).startswith("train.optimizer_in_backward: every optimizer step must be one micro-batch; step ")


def test_a_refused_run_writes_nothing(workspace):
    """A directory half written, or a traceback."""
    lay_out(workspace, hardware__gpu="T4", train__precision="bf16")
    assert error(run()).startswith("train.precision: bf16 needs compute capability 8.0 (Ampere) or later; got bf16 ")
    assert not (workspace / "estimate").exists() and not (workspace / "estimate.json").exists()


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
def test_smaller_micro_batches_are_set_by_the_parameter_of_the_mode(mode, rows, tokens, label):
    """A refused run advised to lower bucket.max_tokens, which bounds nothing in mode fixed."""
    bucket = Bucket(
        max_patches=None, mode=mode, max_tokens=tokens, pad_multiple=8, constant_shape=False, fixed_rows=rows
    )
    assert flags_of(part_of_bucket(bucket, 128, 2)) == (() if label is None else (f"bucket.{label}",))


@pytest.mark.slow
def test_auto_precision_is_reported_and_written_for_other_stages(workspace):
    """Train and evaluate must compute in the type that was predicted, whatever the machine they run on."""
    lay_out(workspace, hardware__gpu="T4", train__precision="auto", train__method="lora")
    done = run()
    assert done.exit_code == 0 and "train.precision: auto is fp16: " in done.output
    assert result(workspace, "precision") == {"precision": "fp16"}


SHARED_PLAN = Plan.of(
    [micro_batch(0, range(2), 128, 60), micro_batch(0, range(3), 80, 40, rank=1)],
    ranks=2,
)


@pytest.mark.slow
def test_a_run_on_several_gpus_is_judged_per_gpu(workspace):
    """Weights of all GPUs counted on each, the larger batch of another GPU missed, or one process on the host."""
    write_plan(workspace / "plan.arrow", [SHARED_PLAN])
    shared = {"hardware__num_gpus": 2, "train__method": "full"}
    metrics = estimated(workspace, train__sharding="ddp", **shared)
    ddp = result(workspace, "breakdown")
    less = estimated(workspace, train__sharding="zero3", **shared)
    zero3, process = result(workspace, "breakdown"), result(workspace, "process")
    for category in ("weights", "optimizer"):
        assert ddp["clip"][category] / zero3["clip"][category] == pytest.approx(2, rel=0.05)
    assert not ddp["forward"].get("sharding") and zero3["forward"]["sharding"]
    assert less["predicted_by_phase"]["clip"] < metrics["predicted_by_phase"]["clip"]
    assert "several GPUs" in metrics["reserved_replayed"]
    assert process["device"]["nccl"]["basis"] == "assumed" and process["processes_per_host"] == 2
    weights = process["host"]["model"]["bytes"]
    assert less["host_bytes_predicted"] >= 2 * process["host"]["process"]["bytes"] + weights > weights > 0


@pytest.mark.slow
def test_a_sharding_mode_that_needs_less_memory_is_offered(workspace, tmp_path):
    """Advice that changes learning where the other GPUs have room."""
    write_plan(workspace / "plan.arrow", [SHARED_PLAN])
    config = llama(hidden_size=1024, intermediate_size=2048, num_attention_heads=8, max_position_embeddings=256)
    config.save_pretrained(tmp_path / "large")
    pin(workspace, tmp_path / "large")
    values = {"hardware__num_gpus": 2, "train__sharding": "ddp", "train__method": "full", "train__grad_ckpt": True}
    values |= {"data__max_length": 128, "bucket__max_tokens": 256}
    peak_bytes = estimated(workspace, **values)["peak_bytes_predicted"]
    estimated(workspace, **{**values, "hardware__gpu": card_for(0.99 * peak_bytes)})
    assert any("train.sharding=" in remedy["command"] for remedy in result(workspace, "advice")["remedies"])


@pytest.mark.slow
def test_the_stage_reads_every_key_of_section_train_that_dvc_yaml_declares(workspace, tmp_path, monkeypatch):
    """A listed key that no code reads reruns the stage. Under DVC, a section that is passed on counts as read."""
    listed = YAML(typ="safe").load((ROOT / "dvc.yaml").read_text())["stages"]["estimate"]["params"]
    keys = {key.removeprefix("train.") for key in listed if key.startswith("train.")} - {"lora", "quant"}
    keys |= {f"{section}.{key}" for section, kind in (("lora", Lora), ("quant", Quant)) for key in kind.model_fields}
    prefixes: dict[type, str] = {Train: "", Lora: "lora.", Quant: "quant."}
    reads: set[str] = set()

    def read(section: Section, name: str) -> Any:
        if type(section) in prefixes and name in type(section).model_fields:
            reads.add(f"{prefixes[type(section)]}{name}")
        return object.__getattribute__(section, name)

    monkeypatch.setattr(load, "check_all_rules", lambda params: None)  # The rules read all parameters.
    monkeypatch.setattr(estimate_run, "sweep_switches", lambda *args, **options: [])
    experts = save_small("Qwen3-MoE", tmp_path / "experts")
    tables = ("plan.arrow", "train-index.arrow", "heldout-index.arrow")
    paths = [Path(name) for name in (*tables, "model.json", "estimate", "estimate.json")]
    for model, values in (
        (None, {"train__method": "qlora", "train__grad_ckpt": True, "train__grad_ckpt_policy": "every_n"}),
        (experts, {"train__method": "lora", "train__lora__experts": "all"}),
        (None, {"train__method": "full"}),
    ):
        if model is not None:
            pin(workspace, model)
        lay_out(workspace, hardware__gpu="24GiB", **values)
        params = load.load_params()
        with monkeypatch.context() as recorded:
            recorded.setattr(Section, "__getattribute__", read, raising=False)
            estimate_run.run_stage(params, *paths)
    # Rules between parameters read `merge`, and runs with hsdp on several GPUs their group. The traced optimizer has
    # arbitrary numbers for the two others.
    assert reads - {"lora", "quant", "lr", "weight_decay"} == keys - {"merge", "shard_group_gpus"}
