"""`lean-finetune doctor --model`: what a model can do, and each refusal with its reason."""

import json
from pathlib import Path

import pytest

from cuda_memory.units import COLUMNS
from lean_finetune.commands.doctor import doctor
from lean_finetune.memory.choice import model_abilities
from lean_finetune.memory.choice.model_abilities import Ability
from tests.json_answers import check_answer
from tests.kit.tiny_config import tiny_config
from tests.workspace import invoke


def findings(directory: Path, family: str, *options: str) -> dict[str, list[dict[str, str]]]:
    """The findings of a small model of a family, by what they are about."""
    tiny_config(family).to_json_file(directory / "config.json", use_diff=False)
    result = invoke(doctor, "--model", str(directory), "--json", *options)
    content = json.loads(result.stdout)
    check_answer("doctor", content)
    assert content["ok"] == (result.exit_code == 0)
    found: dict[str, list[dict[str, str]]] = {}
    for finding in content["findings"]:
        found.setdefault(finding["what"], []).append(finding)
    return found


def only(monkeypatch: pytest.MonkeyPatch, **trials: tuple[str, ...]) -> None:
    """Try only these: each trial that nothing refuses traces a step."""
    for name, kept in trials.items():
        every = getattr(model_abilities, name)
        monkeypatch.setattr(model_abilities, name, {key: every[key] for key in kept})


def test_a_usual_family_can_do_everything_but_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    only(monkeypatch, OBJECTIVES=("sft", "dpo"))
    found = findings(tmp_path, "qwen3", "--gpu", "H100")
    (methods,) = found["methods"]
    assert methods["level"] == "ok" and methods["text"] == "full, lora, qlora, int8_lora"
    rows, no_images = found["rows"]
    assert rows["text"] == "text, packed text" and found["objectives"][0]["text"] == "sft, dpo"
    assert no_images["text"].startswith("not images: model.name: rows with images are not offered for qwen3")
    (switches,) = found["switches"]
    assert switches["text"].startswith("grad_ckpt, selective grad_ckpt, sequence_tiles, compress_activations")
    assert found["several GPUs"][0]["text"].startswith("ddp, zero1, zero2, zero3, tensor_parallel, context_parallel")


def test_a_family_without_packed_rows_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    only(monkeypatch, OBJECTIVES=("sft",), SWITCHES=(), MODES=())
    found = findings(tmp_path, "bloom", "--gpu", "H100")
    assert [row["level"] for row in found["rows"]] == ["ok", "note", "note"]
    assert found["rows"][1]["text"].startswith("not packed text: bucket.mode:")


def test_the_lines_have_80_columns_and_one_remedy_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    modes = ("ddp", "tensor_parallel", "pipeline_stages")
    only(monkeypatch, OBJECTIVES=("sft",), SWITCHES=("grad_ckpt", "sequence_tiles"), MODES=modes)
    tiny_config("gpt_oss").to_json_file(tmp_path / "config.json", use_diff=False)
    result = invoke(doctor, "--model", str(tmp_path), "--gpu", "T4")
    lines = result.stdout.replace(str(tmp_path), "DIR").splitlines()
    assert max(map(len, lines)) <= COLUMNS
    assert any(line.startswith("ok    experts") for line in lines)


def test_a_family_that_nothing_trains_fails(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    result = invoke(doctor, "--model", str(tmp_path), "--gpu", "H100")
    assert result.exit_code == 1 and result.stderr.startswith("error: model.name:")


def test_only_a_model_without_a_method_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Exit code 1 for a model that trains, because no mode of several GPUs suits it."""
    refused = {"rule; remedy": ("x",)}
    none, some = (Ability(what=what, works=(), refused=refused) for what in ("methods", "several GPUs"))
    tiny_config("qwen3").to_json_file(tmp_path / "config.json", use_diff=False)
    for ability, code in ((none, 1), (some, 0)):
        monkeypatch.setattr(model_abilities, "abilities", lambda *args, found=ability: iter([found]))
        assert invoke(doctor, "--model", str(tmp_path), "--gpu", "H100").exit_code == code


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--gpu", "H100"), "--gpu: belongs to --model"),
        (("--model", "no/such/directory", "--gpu", "H100"), "model.name:"),
        (("--model", "llama-3.1-8b", "--gpu", "no such GPU"), "hardware.gpu:"),
    ],
)
def test_wrong_options_are_one_line(options: tuple[str, ...], message: str):
    result = invoke(doctor, *options)
    assert result.exit_code in (1, 2) and message in result.stderr and result.stderr.count("\n") == 1
