"""`lean-finetune preset`: what it writes, and that nothing is written if the parameters would be wrong."""

import shutil
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from lean_finetune.commands.choose.plan import plan
from lean_finetune.commands.fit import fit
from lean_finetune.commands.preset import import_config, preset
from lean_finetune.commands.project.params_file import PRESETS, change_params
from lean_finetune.config.load import load_params
from lean_finetune.config.rules import SWITCHED_OFF
from tests.conftest import ROOT
from tests.workspace import error, invoke


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with params.yaml and no presets of the user's."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "params.yaml", tmp_path)
    (tmp_path / "presets").mkdir()
    return tmp_path


def test_a_preset_changes_its_lines_and_no_other(checkout: Path):
    """A rewritten file would lose the comments, or show hundreds of changed lines in git."""
    before = (checkout / "params.yaml").read_text().splitlines()
    result = invoke(preset, "8b-full-24gb")
    assert result.exit_code == 0 and "train.method: full" in result.output
    assert "train.max_grad_norm: \n" in result.output
    after = (checkout / "params.yaml").read_text().splitlines()
    assert len(after) == len(before)
    changed = [line.strip() for line, old in zip(after, before, strict=True) if line != old]
    assert len(changed) == len(result.stdout.splitlines()) and "max_grad_norm:" in changed
    assert "note: meta-llama/Llama-3.1-8B is gated on the hub: accept its licence at " in result.stderr
    p = load_params(checkout / "params.yaml")
    assert p.train.optimizer_in_backward and p.train.max_grad_norm is None and p.data.source == "data/raw/sample.jsonl"
    assert invoke(preset, "8b-full-24gb").output == "no change\n"
    invoke(preset, "tiny")
    assert load_params(checkout / "params.yaml").train.method == "qlora"


def test_a_preset_after_another_leaves_nothing_of_it(checkout: Path):
    """Every preset sets the same parameters; what one leaves out is a switch, which is then off."""
    given = {path.stem: YAML(typ="safe").load(path.read_text()) for path in PRESETS.iterdir()}
    off = {*SWITCHED_OFF}
    keys = {
        name: {f"{section}.{key}" for section, own in preset.items() for key in own} for name, preset in given.items()
    }
    assert len(keys) == 14 and all(own - off == keys["tiny"] - off for own in keys.values())
    assert all(keys["tiny"] <= own for own in keys.values())


def test_a_preset_turns_off_the_memory_switches_that_it_does_not_name(checkout: Path):
    """A switch of an earlier run that stays on: tensor parallelism on the one GPU of the preset."""
    file = checkout / "params.yaml"
    change_params({"hardware": {"num_gpus": 4}, "train": {"tensor_parallel": 4}}, file, file)
    (checkout / "presets/mine.yaml").write_text("# Mine.\ntrain:\n  lr: 0.001\n")
    assert invoke(preset, "mine").output == "train.lr: 0.001\n"
    assert invoke(preset, "8b-qlora-24gb").exit_code == 0
    assert load_params(file).train.tensor_parallel == 1


def test_presets_are_listed_with_what_they_are_for(checkout: Path):
    (checkout / "presets/mine.yaml").write_text("# Mine.\n")
    lines = invoke(preset).output.splitlines()
    assert len(lines) == len(list(PRESETS.iterdir())) + 1 and any(line.split() == ["mine", "Mine."] for line in lines)
    assert any(line.startswith("8b-qlora-24gb ") and "24 GB" in line for line in lines)


def test_wrong_presets_are_refused_and_nothing_is_written(checkout: Path):
    before = (checkout / "params.yaml").read_bytes()
    for wrong in ("9b", "../params"):
        refusal = error(invoke(preset, wrong), 2)
        assert refusal.startswith("NAME: must be one of 0.5b-lora-4gb, ") and refusal.endswith(f"; got {wrong}")
    (checkout / "presets/mine.yaml").write_text("# Mine.\ndata:\n  max_length: 2048\n")
    assert error(invoke(preset, "mine")).startswith("bucket.max_tokens: ")
    (checkout / "presets/mine.yaml").write_text("# Mine.\ntrain:\n  learning_rate: 1.0\n")
    assert error(invoke(preset, "mine")).startswith("train.learning_rate: ")
    assert (checkout / "params.yaml").read_bytes() == before


def test_without_a_params_yaml_presets_are_listed_and_one_line_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """An installed lean-finetune outside of a clone had no presets."""
    monkeypatch.chdir(tmp_path)
    assert "8b-qlora-24gb " in invoke(preset).output
    missing = error(invoke(preset, "8b-qlora-24gb"))
    assert (
        missing
        == "params.yaml: file is missing here; run in a project's directory, or make one with `lean-finetune init`"
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (preset, ("8b-full-24gb",)),
        (import_config, ("run.yaml",)),
        (plan, ("--length", "64")),
        (fit, ("--length", "64", "--apply")),
    ],
)
def test_nothing_is_written_through_a_link_out_of_the_directory(checkout: Path, tmp_path_factory, command, words):
    """A command changed a params.yaml of another project."""
    outside = tmp_path_factory.mktemp("other") / "params.yaml"
    (checkout / "params.yaml").rename(outside)
    (checkout / "params.yaml").symlink_to(outside)
    (checkout / "run.yaml").write_text("model_name_or_path: org/model\nstage: sft\ntemplate: qwen\nlora_target: all\n")
    before = outside.read_text()
    line = error(invoke(command, *words))
    assert line.startswith(f"params.yaml: a link leads to {outside}, outside of this directory")
    assert outside.read_text() == before and (checkout / "params.yaml").is_symlink()
