"""`--what-fits`: the whole answer from params.yaml and a config, and one line for each fault."""

import json
import re
import shutil
from pathlib import Path

import pytest

from stages.estimate.__main__ import main
from stages.units import GIB
from tests.estimate.common import card_for
from tests.workspace import invoke, lay_out, told


@pytest.fixture
def workspace(tmp_path: Path, small_llama: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with params.yaml and a bare config.json: no plan, no locks, no weights."""
    lay_out(tmp_path, hardware__gpu="24GiB", data__max_length=128, bucket__max_tokens=256, run__progress=False)
    (tmp_path / "model").mkdir()
    shutil.copy(small_llama / "config.json", tmp_path / "model" / "config.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ask(*arguments: str):
    return invoke(main, "--what-fits", *arguments)


def test_everything_is_told_without_a_pipeline(workspace):
    """A question that needs a plan, or that leaves files behind."""
    before = sorted(workspace.rglob("*"))
    result = ask("--model", "model", "--gpu", "T4")
    assert result.exit_code == 0, result.stderr
    told_of = [line.split()[0] for line in result.stdout.splitlines()]
    assert told_of == (
        "device model run attention forward backward clip optimizer verdict smallest longest budget".split()
    )
    assert "verdict    fits: " in result.stdout and "smallest   P4 " in result.stdout
    assert "longest    256 tokens, limited by the model's 256 positions" in result.stdout
    assert sorted(workspace.rglob("*")) == before


def test_a_run_that_does_not_fit_is_told_lines_to_run(workspace):
    """A refusal without a way out; a config.json alone that is no model."""
    lay_out(workspace, data__max_length=128, bucket__max_tokens=65536)  # Larger than a CUDA context.
    fits = ask("--model", "model/config.json", "--gpu", "24GiB").stdout
    peak_gib = float(re.search(r"verdict    fits: ([0-9.]+) GiB of", fits)[1])  # type: ignore[index]
    result = ask("--model", "model", "--gpu", card_for(0.9 * peak_gib * GIB))
    assert result.exit_code == 0, result.stderr
    assert "verdict    does not fit: " in result.stdout and ", less 525 MiB for a CUDA context" in result.stdout
    assert "advice     ranked by what is learnt, then by the speed of A100-80GB: that of " in result.stdout
    assert "\n  dvc exp run -S " in result.stdout
    assert "changes nothing that is learnt" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ("--gpu", "RTX-409"),
            "hardware.gpu: must be auto, a size such as 24GiB or a known GPU; got 'RTX-409'; could be: ",
        ),
        (
            ("--model", "absent"),
            "--model: must be tiny, a directory with config.json, or the path of one; got 'absent'",
        ),
    ],
)
def test_faults_are_one_line(workspace, arguments, line):
    """A traceback."""
    assert told(ask(*arguments)).startswith(line)


def test_impossible_precision_custom_code_and_missing_fields_are_one_line(workspace):
    """A precision the card lacks, code of the model's own run, or sizes made up."""
    lay_out(workspace, train__precision="bf16", data__max_length=128, bucket__max_tokens=256)
    assert told(ask("--model", "model", "--gpu", "T4")).startswith("train.precision: bf16 needs compute capability 8.0")
    path = workspace / "model" / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in values.items() if k != "hidden_size"}))
    assert "missing hidden_size" in told(ask("--model", "model", "--gpu", "H100"))
    custom = {**values, "model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}
    path.write_text(json.dumps(custom))
    assert told(ask("--model", "model", "--gpu", "H100")).startswith("model.name: ")


def test_flags_of_the_question_are_refused_without_it(workspace):
    """--gpu given to the stage and passed over."""
    assert told(invoke(main, "--gpu", "T4")).startswith("--gpu, --model: have an effect only with --what-fits")
