"""`lean-finetune fit`: the whole answer from params.yaml and a config, and one line for each fault."""

import json
import re
import shutil
from collections.abc import Iterator
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any

import pytest

from lean_finetune.cli import fit
from lean_finetune.config.load import load_params
from lean_finetune.config.overrides import with_flags
from lean_finetune.config.schema import Params
from lean_finetune.core.units import GIB
from lean_finetune.memory.advice import fit_command
from lean_finetune.memory.advice.fit_command import tell_what_fits
from lean_finetune.memory.gpus import BF16_CAPABILITY, context_of
from tests.memory.common import card_for
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
    return invoke(fit, *arguments)


def test_everything_is_told_without_a_pipeline(workspace):
    """A question that needs a plan, or that leaves files behind."""
    before = sorted(workspace.rglob("*"))
    result = ask("--model", "model", "--gpu", "T4")
    assert result.exit_code == 0, result.stderr
    told_of = [line.split()[0] for line in result.stdout.splitlines()]
    assert told_of == (
        "params device model run attention forward backward clip optimizer verdict smallest longest budget".split()
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


CASES = [
    {"train__method": "lora"},
    {"train__method": "full", "train__precision": "bf16", "train__tokens_per_step": 131072},
    {"train__method": "full", "train__max_grad_norm": None, "bucket__mode": "packed"},
    {"train__method": "lora", "hardware__num_gpus": 2, "train__sharding": "ddp"},
]


@pytest.mark.parametrize(("values", "share"), [(CASES[0], 0.9)])
def test_every_line_told_fits_when_it_is_given(workspace, values, share):
    """A line that does not fit in the run that it leads to, or that the tool refuses."""
    _give_every_line(workspace, values, share)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.9, 0.5])
@pytest.mark.parametrize("values", CASES)
def test_every_line_told_fits_whatever_the_run_is(workspace, values, share):
    """As above."""
    _give_every_line(workspace, values, share)


def _give_every_line(workspace: Path, values: dict[str, Any], share: float) -> None:
    common = {"data__max_length": 128, "bucket__max_tokens": 262144, "train__tokens_per_step": 262144}
    lay_out(workspace, **{**common, "train__loss_chunk": None, "estimate__headroom_percent": 0.0, **values})
    parameters = load_params(workspace / "params.yaml")
    (fits,) = told_until_advice(parameters, "800GiB")
    gpu = f"{share * float(fits.split()[2]) + context_of(BF16_CAPABILITY).max_bytes / GIB:.4f}GiB"
    verdict, *advice = told_until_advice(parameters, gpu)
    assert verdict.startswith("verdict    does not fit")
    lines = [line.removeprefix("  dvc exp run -S ") for line in advice if line.startswith("  dvc exp run ")]
    assert lines
    for line in lines:
        changed = with_flags(parameters, line.split(" -S "))
        assert next(iter(told_until_advice(changed, gpu))).startswith("verdict    fits: "), line


def told_until_advice(params: Params, gpu: str) -> list[str]:
    """The verdict with its advice; what would fit else is not asked for."""
    told_of = tell_what_fits(params, gpu, Path("model"))
    start = dropwhile(lambda line: not line.startswith("verdict"), told_of)
    return list(takewhile(lambda line: line.startswith(("verdict", "advice", "  ")), stop_at_fit(start)))


def stop_at_fit(lines: Iterator[str]) -> Iterator[str]:
    """The lines as far as the verdict where that is that the run fits."""
    for line in lines:
        yield line
        if line.startswith("verdict    fits: "):
            return


def test_the_verdict_is_told_before_anything_is_searched(workspace, monkeypatch):
    """Half a minute of search before the word that was asked for."""
    lay_out(workspace, data__max_length=128, bucket__max_tokens=65536)

    def search(*arguments: object, **options: object) -> None:
        raise AssertionError("searched")

    monkeypatch.setattr(fit_command, "answer", search)
    lines = tell_what_fits(load_params(workspace / "params.yaml"), "0.6GiB", Path("model"))
    assert any(line.startswith("verdict    does not fit: ") for line in lines)  # As far as that line and no further.


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ("--gpu", "RTX-409"),
            "hardware.gpu: must be auto, a size such as 24GiB or a known GPU; got 'RTX-409'; could be: ",
        ),
        (
            ("--model", "absent"),
            "--model: must be tiny, a directory with config.json, or the path of a file of that name; got 'absent'",
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
