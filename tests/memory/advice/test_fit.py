"""`lean-finetune fit`: the answer from a config.json, its options, and one line for each error."""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from cuda_memory.units import COLUMNS, LABEL_WIDTH, MIB, labelled
from lean_finetune.commands import fit_text
from lean_finetune.commands.fit import fit, gpu_flags
from lean_finetune.commands.fit_text import dying_lines, fit_lines, tier_lines
from lean_finetune.config.load import COMMON_PARAMS, load_params, with_flags
from lean_finetune.memory.advice.full_rows import fit_run
from lean_finetune.memory.advice.plan_memory import PlanMemory
from lean_finetune.memory.advice.run import Run
from lean_finetune.memory.advice.verdict import (
    answer,
    deciding_tier,
    dying_first_step,
    judge_run,
    offloaded_first_step,
    predict_tiers,
)
from lean_finetune.memory.predict.peak import Prediction
from tests.conftest import ROOT
from tests.memory.common import card_for
from tests.pinning.hub_server import serve, use_hub
from tests.workspace import error, invoke, lay_out


@pytest.fixture
def workspace(tmp_path: Path, small_llama: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with params.yaml and a config.json: no plan, locks or weights."""
    lay_out(tmp_path, hardware__gpu="24GiB", data__max_length=128, bucket__max_tokens=256, run__progress=False)
    (tmp_path / "model").mkdir()
    shutil.copy(small_llama / "config.json", tmp_path / "model" / "config.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_of(workspace: Path, gpu: str, flags: list[str]) -> Run:
    """The run of params.yaml with the model beside it."""
    p = load_params(workspace / "params.yaml")
    return fit_run(with_flags(p, ["model.name=model", f"hardware.gpu={gpu}", *flags]))


def test_a_run_that_fits_is_answered_in_80_columns_and_leaves_no_file(workspace: Path):
    """A verdict below a page of details, a line that a terminal breaks, colours in a file, or files left behind."""
    before = sorted(workspace.rglob("*"))
    result = invoke(fit, "--params", "params.yaml", "--model", "model", "--gpu", "T4")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= COLUMNS and "\x1b" not in result.stdout
    labels = [text[:LABEL_WIDTH].strip() for text in lines if text and not text.startswith(" ")]
    peaks = ["peak by phase, as a s", "at the peak, in forwa"]
    limits = ["smallest GPU", "longest row", "largest micro-batch"]
    settings = ["params", "device", "model", "run", "micro-batches", "speed", "attention"]
    assert labels == ["verdict", *peaks, "allocator segments", *settings, *limits, "verdict"]
    assert lines[0].startswith(labelled("verdict", "fits: reserves ")) and lines[-1] == lines[0]
    assert labelled("smallest GPU", "P4 (of") in result.stdout
    assert labelled("longest row", "256 tokens, limited by the model's 256 positions") in result.stdout
    assert labelled("largest micro-batch", "2,048 tokens, limited by train.tokens_per_step") in result.stdout
    assert sorted(workspace.rglob("*")) == before


def test_options_set_the_run_and_json_has_it_in_bytes(workspace: Path):
    """An option without effect, toy parameters taken from the directory, or sizes that a program has to parse."""
    options = "--model model --gpu T4 --gpus 2 --method lora --length 100 --precision fp32 --set train.lora.rank=2"
    content = json.loads(invoke(fit, *options.split(), "--json").stdout)
    p = content["params"]
    assert (p["hardware"]["num_gpus"], p["train"]["sharding"], p["train"]["method"]) == (2, "zero3", "lora")
    assert (p["data"]["max_length"], p["bucket"]["max_tokens"], p["train"]["lora"]["rank"]) == (100, 104, 2)
    assert content["precision"] == "fp32" and content["micro_batch"] == {"rows": 1, "tokens_per_row": 104}
    assert p["train"]["grad_ckpt"] and content["verdict"] == "fits" and content["would_fit"] == []
    forward = content["phases"]["forward"]
    assert forward["peak_bytes"] == sum(forward["by_category_bytes"].values()) <= content["peak_bytes"]


@pytest.mark.parametrize(
    ("gpus", "others", "sharding"),
    [
        (1, "train.sharding=zero3", "none"),
        (2, "train.tensor_parallel=2", "none"),
        (4, "train.tensor_parallel=2", "zero3"),
        (2, "train.pipeline_stages=2", "none"),
        (2, "train.context_parallel=2", "zero3"),
        (2, "train.sharding=zero2", "zero2"),
        (2, "train.method=int8_lora", "ddp"),
    ],
)
def test_gpus_share_what_is_not_divided_otherwise(gpus: int, others: str, sharding: str):
    """`--gpus 2 --set train.tensor_parallel=2` refused because of a mode that the user did not set."""
    p = load_params(COMMON_PARAMS)
    flags = gpu_flags(p, gpus, [others])
    assert flags == [f"hardware.num_gpus={gpus}", f"train.sharding={sharding}"]
    assert with_flags(p, [others, *flags]).train.sharding == sharding


def test_without_a_model_the_directory_must_have_a_params_yaml(workspace: Path):
    """An answer for the shipped toy, or for another run than the one in this directory."""
    content = json.loads(invoke(fit, "--set", "model.name=model", "--json").stdout)
    assert content["params"]["bucket"]["max_tokens"] == 256
    (workspace / "params.yaml").unlink()
    assert error(invoke(fit, "--gpu", "T4"), 2).startswith("--model: name a hub id, a directory or a config.json")
    assert error(invoke(fit, "--params", "none.yaml")).startswith("none.yaml: file does not exist")


def test_of_a_hub_model_config_json_alone_is_fetched(workspace: Path, monkeypatch: pytest.MonkeyPatch):
    """Gigabytes of weights downloaded for a question."""
    files = {"config.json": (workspace / "model/config.json").read_bytes(), "model.safetensors": b"0" * 20_000}
    with serve({"models/org/name": files}) as hub:
        use_hub(monkeypatch, hub, workspace / "cache")
        result = invoke(fit, "--model", "org/name", "--gpu", "T4", "--json")
    assert json.loads(result.stdout)["model"]["name"] == "org/name"
    assert not any("safetensors" in request for request in hub.requests)


CASES = [
    {"train__method": "lora"},
    {"train__method": "full", "train__precision": "bf16", "train__tokens_per_step": 131072},
    {"train__method": "full", "train__max_grad_norm": None, "bucket__mode": "packed"},
    {"train__method": "lora", "hardware__num_gpus": 2, "train__sharding": "ddp"},
]


@pytest.mark.parametrize("share", [0.9, 0.5])
@pytest.mark.parametrize("values", CASES)
@pytest.mark.slow
def test_a_run_with_the_advised_overrides_fits(workspace: Path, values: dict[str, Any], share: float):
    """Overrides that do not fit in the run that they lead to, or that the command refuses."""
    common = {"data__max_length": 128, "bucket__max_tokens": 262144, "train__tokens_per_step": 262144}
    lay_out(workspace, **{**common, "train__loss_chunk": None, "estimate__headroom_percent": 0.0, **values})
    peak_bytes = run_of(workspace, "800GiB", []).predict().peak.bytes
    gpu = card_for(int(share * peak_bytes))
    run = run_of(workspace, gpu, [])
    prediction = run.predict()
    found = answer(run, prediction)
    assert not judge_run(run, prediction).fits and found.remedies
    assert found.ranked is not None and "by effect on learning, then by the speed of A100-80GB" in found.ranked
    for remedy in found.remedies:
        changed = run_of(workspace, gpu, list(remedy.flags))
        assert judge_run(changed, changed.predict()).fits, remedy.flags


def test_reserved_memory_decides_where_tensors_alone_fit(workspace: Path):
    """A run said to fit by its tensors, whose blocks do not: fixed segments, and hardly more than the tensors need."""
    flags = ["estimate.headroom_percent=0", "train.expandable_segments=false", "data.max_length=256"]
    _, large = predict_tiers(run_of(workspace, "80GiB", flags))
    assert large is not None
    run = run_of(workspace, card_for(large.tiers()["expandable"]["tensors_bytes"] + MIB // 8), flags)
    prediction, memory = predict_tiers(run)
    tiers = large.tiers()["native"]
    assert prediction.peak.bytes <= tiers["tensors_bytes"] <= tiers["reserved_bytes"] < tiers["process_bytes"]
    assert large.tiers()["expandable"]["tensors_bytes"] == prediction.peak.bytes == run.predict().peak.bytes
    shown = fit_lines(run, prediction, memory, "", "lean-finetune fit", "--set")
    assert next(shown).startswith(labelled("verdict", "does not fit: reserves "))
    assert not judge_run(run, prediction, memory).fits and judge_run(run, prediction).fits
    assert memory is not None and "fixed segments: out of memory in optimizer step 0, " in shown_tiers(
        run, prediction, memory
    )
    assert deciding_tier(prediction, memory, run.device, 0.0) == "reserved"


def shown_tiers(run: Run, prediction: Prediction, memory: PlanMemory | None) -> str:
    return " ".join(" ".join(tier_lines(run, prediction, memory)).split())


def test_a_run_that_dies_in_its_first_update_shows_the_curve_of_its_first_step():
    """A user whose tool reported 46 GB, 61 GB and out of memory does not find the run in the answer."""
    flags = [
        f"model.name={ROOT}/lean_finetune/example_configs/llama-3.1-8b",
        "train.method=full",
        "train.master_weights=true",
    ]
    flags += ["data.max_length=128", "bucket.max_tokens=128"]
    run, large = (
        fit_run(with_flags(load_params(COMMON_PARAMS), [*flags, f"hardware.gpu={gpu}"]))
        for gpu in ("A100-80GB", "H200")
    )
    prediction = run.predict()
    found = dying_first_step(run, prediction)
    assert found is not None and dying_first_step(large, prediction) is None
    values = 8_030_261_248
    for size, bytes_a_value in ((found.loading, 6), (found.after_backward, 8), (found.update, 16)):
        assert size == pytest.approx(bytes_a_value * values, rel=0.02)
    assert found.loading < found.forward < found.after_backward
    lines = list(dying_lines(run, prediction))
    marked = next(place for place, line in enumerate(lines) if "out of memory here: " in line)
    assert lines[marked - 1].startswith("  first update") and sum("out of memory" in line for line in lines) == 1
    flat = offloaded_first_step(run)
    assert (
        flat is not None and flat.update == pytest.approx(flat.after_backward, rel=0.001) and flat.update < 5 * values
    )
    shown = lines[lines.index("tensors over the first step, with train.offload=optimizer") + 1 :]
    assert [line[2:20].strip() for line in shown] == list(flat.instants())


def test_several_gpus_add_nccl_to_the_process_and_a_pipeline_says_that_it_is_unknown(workspace: Path):
    """The memory of one GPU shown for several, or nothing said where nothing is known."""
    several = ["hardware.num_gpus=2", "train.method=lora"]
    sharded = run_of(workspace, "80GiB", [*several, "train.sharding=zero3"])
    prediction, memory = predict_tiers(sharded)
    assert memory is not None
    assert "reserved and process are estimates: the margin of sharded" in shown_tiers(sharded, prediction, memory)
    tiers = memory.tiers()["native"]
    assert tiers["process_bytes"] - tiers["reserved_bytes"] == (141 + 256) * MIB
    run = run_of(workspace, "80GiB", [*several, "train.pipeline_stages=2"])
    prediction, memory = predict_tiers(run)
    assert memory is None
    shown = fit_lines(run, prediction, memory, "", "lean-finetune fit", "--set")
    assert labelled("reserved memory", "unknown for stages of a pipeline, and so is the process") in shown


def test_what_would_fit_is_a_line_to_paste(workspace: Path):
    """Advice for dvc outside of a checkout, or a line that lacks the options of this run."""
    options = ["--model", "model", "--length", "256", "--method", "lora"]
    usual = ["--set", "bucket.max_tokens=65536", "--set", "train.grad_ckpt=false", "--set", "train.loss_chunk=null"]
    needed = json.loads(invoke(fit, *options, *usual, "--gpu", "80GiB", "--json").stdout)["peak_bytes"]
    refused = invoke(fit, *options, *usual, "--gpu", card_for(needed // 2))
    shown = refused.stdout
    assert refused.exit_code == 3 and shown.startswith(labelled("verdict", "does not fit: needs "))
    command = shown.split("\n  lean-finetune fit ")[1].replace("\\\n", " ").splitlines()[0]
    words = shlex.split(command)
    assert {*options, *usual} < {*words}
    answer = invoke(fit, *words)
    assert answer.exit_code == 0 and answer.stdout.startswith(labelled("verdict", "fits: ")), answer.output


def test_the_verdict_comes_before_the_search(workspace: Path, monkeypatch: pytest.MonkeyPatch):
    """Half a minute of search before the answer to the question."""
    lay_out(workspace, data__max_length=128, bucket__max_tokens=65536)
    run = run_of(workspace, card_for(2**20), [])
    lines = fit_lines(run, *predict_tiers(run), "", "lean-finetune fit", "--set")
    monkeypatch.delattr(fit_text, "answer")
    assert next(lines).startswith(labelled("verdict", "does not fit: needs "))


def test_json_has_the_exit_code_of_the_verdict_and_an_unknown_gpu_that_of_a_wrong_call(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
):
    """A script that takes an answer for a run that fits."""
    monkeypatch.setattr(fit_text, "answer", lambda run, prediction, memory: Mock(remedies=()))
    result = invoke(fit, "--model", "model", "--gpu", card_for(2**20), "--json")
    assert result.exit_code == 3 and json.loads(result.stdout)["verdict"] == "does not fit"
    unknown = error(invoke(fit, "--model", "model", "--gpu", "H1000"), 2)
    assert unknown.startswith("hardware.gpu: ") and "H1000" in unknown


def test_a_model_that_does_not_exist_is_one_line(workspace: Path):
    """A traceback."""
    text = error(invoke(fit, "--model", "absent"))
    assert text.startswith("model.name: must be a hub id org/name, a directory with config.json, the path of a file of")
    assert "or one of llama-3.1-70b, llama-3.1-8b, " in text and "; got 'absent'; " in text


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("train.lora.rank", "train.lora.rank: must be key=value"),
        ("train.lr.peak=1", "train.lr.peak: lr has no parameters below it"),
        ("train.lora={", "train.lora: must be a YAML value"),
        ("nothing.at.all=1", "nothing: unknown parameter"),
    ],
)
def test_a_setting_of_another_form_is_one_line(workspace: Path, flag: str, expected: str):
    """A KeyError, or a setting that is ignored."""
    assert error(invoke(fit, "--model", "model", "-S", flag), 2).startswith(expected)


def test_a_config_that_is_no_model_is_one_line(workspace: Path):
    """Python's names for a wrong value, or a traceback."""
    path = workspace / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "hidden_size": None}))
    refusal = error(invoke(fit, "--model", "model", "--gpu", "H100"))
    assert refusal.startswith("model.name: ") and "hidden_size" in refusal and "Error" not in refusal
