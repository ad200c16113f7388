"""`lean-finetune fit`: the answer from params.yaml and a config.json, and one line for each error."""

import json
import re
import shutil
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from lean_finetune.cli import fit
from lean_finetune.config.load import load_params
from lean_finetune.config.overrides import with_flags
from lean_finetune.config.schema import Params
from lean_finetune.core.units import GIB
from lean_finetune.memory.advice.fit_command import LABEL_WIDTH, fit_report, labelled
from tests.memory.common import card_for
from tests.workspace import error, invoke, lay_out


@pytest.fixture
def workspace(tmp_path: Path, small_llama: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with params.yaml and a config.json: no plan, locks or weights."""
    lay_out(tmp_path, hardware__gpu="24GiB", data__max_length=128, bucket__max_tokens=256, run__progress=False)
    (tmp_path / "model").mkdir()
    shutil.copy(small_llama / "config.json", tmp_path / "model" / "config.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_that_fits_needs_no_pipeline(workspace):
    """A command that needs a plan, or that writes files."""
    before = sorted(workspace.rglob("*"))
    result = invoke(fit, "--model", "model", "--gpu", "T4")
    assert result.exit_code == 0, result.stderr
    labels = [text[:LABEL_WIDTH].strip() for text in result.stdout.splitlines()]
    phases = [f"peak in {phase}" for phase in ("forward", "backward", "clip", "optimizer")]
    limits = ["smallest GPU", "longest row", "largest micro-batch"]
    assert labels == ["params", "device", "model", "run", "attention", *phases, "verdict", *limits]
    assert labelled("verdict", "fits: ") in result.stdout and labelled("smallest GPU", "P4 ") in result.stdout
    assert labelled("longest row", "256 tokens (= the model's 256 positions)") in result.stdout
    assert labelled("largest micro-batch", "2048 tokens (= train.tokens_per_step)") in result.stdout
    assert sorted(workspace.rglob("*")) == before


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
    parameters = load_params(workspace / "params.yaml")
    (fits,) = verdict_and_advice(parameters, "800GiB")
    peak_gib = float(re.search(r"peak ([0-9.]+) GiB", fits)[1])  # type: ignore[index]
    gpu = card_for(share * peak_gib * GIB)
    verdict, ranked, *advice = verdict_and_advice(parameters, gpu)
    assert verdict.startswith(labelled("verdict", "does not fit: "))
    assert "by effect on learning, then by the speed of A100-80GB" in ranked
    commands = [text for text in advice if text.startswith("  dvc exp run -S ")]
    assert commands
    for command in commands:
        changed = with_flags(parameters, command.removeprefix("  dvc exp run -S ").split(" -S "))
        assert verdict_and_advice(changed, gpu)[0].startswith(labelled("verdict", "fits: ")), command


def verdict_and_advice(params: Params, gpu: str) -> list[str]:
    """The lines of the verdict and its advice, without the search for limits that comes after them."""
    report = fit_report(params, gpu, Path("model"))
    verdict = next(text for text in report if text.startswith("verdict"))
    if verdict.startswith(labelled("verdict", "fits: ")):
        return [verdict]
    return [verdict, *takewhile(lambda text: text.startswith(("advice", "  ")), report)]


def test_the_verdict_comes_before_the_search(workspace):
    """Half a minute of search before the answer to the question."""
    lay_out(workspace, data__max_length=128, bucket__max_tokens=65536)
    report = fit_report(load_params(workspace / "params.yaml"), card_for(2**20), Path("model"))
    lines = [next(report) for _ in range(9)]  # The generator stops before the search.
    assert lines[-1].startswith(labelled("verdict", "does not fit: peak "))
    assert ", less 525 MiB for a CUDA context" in lines[0]


def test_a_model_that_does_not_exist_is_one_line(workspace):
    """A traceback."""
    expected = "--model: must be tiny, a directory with config.json, or the path of a file of that name; got 'absent'"
    assert error(invoke(fit, "--model", "absent")).startswith(expected)


def test_a_config_that_is_no_model_is_one_line(workspace: Path):
    """Python's names for a wrong value, or a traceback."""
    path = workspace / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "hidden_size": None}))
    refusal = error(invoke(fit, "--model", "model", "--gpu", "H100"))
    assert refusal.startswith("model.name: ") and "hidden_size" in refusal and "Error" not in refusal
