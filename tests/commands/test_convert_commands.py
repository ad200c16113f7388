"""`fit --from` and `import`: what the commands print, write and refuse."""

import json
from pathlib import Path

import pytest

from lean_finetune.commands.fit import fit
from lean_finetune.commands.import_config import import_config
from lean_finetune.config.load import load_params
from tests.commands.tool_configs import LLAMA_FACTORY, TORCHTUNE, TRL
from tests.conftest import ROOT
from tests.workspace import error, invoke


def test_fit_answers_for_a_configuration_and_names_its_keys_last(small_llama: Path, tmp_path: Path):
    """A verdict below a page of keys, or options that a configuration overrides."""
    (tmp_path / "run.yaml").write_text(LLAMA_FACTORY)
    options = [
        "--from",
        str(tmp_path / "run.yaml"),
        "--model",
        str(small_llama),
        "--gpu",
        "RTX-4090",
        "--length",
        "128",
    ]
    text = invoke(fit, *options, "--keys").stdout.replace(str(small_llama), "DIR").replace(str(tmp_path), "DIR")
    lines, words = text.splitlines(), " ".join(text.split())
    assert lines[0].startswith("as that tool runs it fits in LLaMA-Factory: needs ")
    assert max(len(line) for line in lines) <= 100
    assert "as it would run here fits: needs " in words and " less than in LLaMA-Factory verdict here" in words
    start = lines.index("from a configuration of LLaMA-Factory")
    different, used = (
        next(number for number, line in enumerate(lines) if line.startswith(words))
        for words in ("  different here", "  used               quantization_bit → train.method")
    )
    assert start < different < used
    content = json.loads(invoke(fit, *options, "--json").stdout)
    assert content["params"]["data"]["max_length"] == 128 and content["params"]["train"]["method"] == "qlora"
    assert content["from"]["unknown"] == ["some_new_key"]


def test_a_micro_batch_larger_than_any_gpu_is_a_wrong_command_line(small_llama: Path, tmp_path: Path):
    """A machine whose memory fills with the list of its rows."""
    text = TRL.replace("per_device_train_batch_size: 4", "per_device_train_batch_size: 1000000000")
    (tmp_path / "run.yaml").write_text(text)
    options = ["--from", str(tmp_path / "run.yaml"), "--model", str(small_llama), "--gpu", "T4"]
    assert "bucket.max_tokens: must be at most 67108864 for a prediction" in error(invoke(fit, *options), 2)


@pytest.mark.parametrize("option", [("--gpu", "NOPE"), ("--set", "train.lora.rank=many"), ("--set", "hardware.gpu=X")])
def test_a_wrong_option_beside_a_configuration_is_a_wrong_command_line(tmp_path: Path, option: tuple[str, str]):
    """Exit code 1, as if the configuration were wrong."""
    (tmp_path / "run.yaml").write_text(LLAMA_FACTORY)
    assert option[1].split("=")[-1] in error(invoke(fit, "--from", str(tmp_path / "run.yaml"), *option), 2)


def test_import_writes_a_params_yaml_and_keeps_its_comments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Toy values left in the run, comments lost, or a file that `dvc exp run -S` cannot rewrite."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(LLAMA_FACTORY)
    result = invoke(import_config, "run.yaml", "--out", "new.yaml")
    assert result.exit_code == 0 and load_params(tmp_path / "new.yaml").train.lr == 1e-4
    assert "`lean-finetune fit --params new.yaml` predicts its memory" in result.stdout  # No dvc.yaml here.
    shipped = (ROOT / "params.yaml").read_text(encoding="utf-8")
    (tmp_path / "params.yaml").write_text(shipped)
    invoke(import_config, "run.yaml")
    written = (tmp_path / "params.yaml").read_text(encoding="utf-8")
    params = load_params(tmp_path / "params.yaml")
    assert (params.model.name, params.train.lr, params.train.precision) == ("org/model", 1e-4, "bf16")
    assert params.run == load_params(ROOT / "params.yaml").run
    comments = [line for line in shipped.splitlines() if line.strip().startswith("#")]
    assert [line for line in comments if line not in written.splitlines()] == []
    assert error(invoke(import_config, "absent.yaml")).startswith("absent.yaml: file does not exist")
    assert (tmp_path / "params.yaml").read_text(encoding="utf-8") == written


def test_a_missing_model_or_file_is_named_as_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`there is no params.yaml here` for a configuration that names no model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(TORCHTUNE.replace("checkpoint_dir: /models/llama/", "output_dir: out"))
    result = invoke(fit, "--from", "run.yaml")
    assert "name a hub id, a directory or a config.json; run.yaml names no model" in result.stderr
    assert "there is no params.yaml here" in invoke(fit).stderr
    assert "absent.yaml: file does not exist; name another" in invoke(fit, "--params", "absent.yaml").stderr
