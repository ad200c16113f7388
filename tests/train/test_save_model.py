"""Saving: complete or not at all, and in a form that other libraries load."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from lean_finetune.core.errors import UserError
from lean_finetune.pinning.locate import TINY_DIRECTORY, TOKENIZER_FILES, TOOL_TEMPLATE, FileVersions, model_address
from lean_finetune.step.parallel_model import ParallelModel
from lean_finetune.train.save_model import save_tuned
from tests.kit.loaded import load_model
from tests.processes import run_bounded
from tests.small_model import CPU, base_of, spec_of


def test_full_disk_while_saving_is_one_line_and_leaves_no_partial_output(small_llama: Path, tmp_path: Path):
    """Safetensors raises its own error type; a trained model must not end in a traceback."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = run_bounded(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk])
    if mounted.returncode:
        pytest.skip("this machine does not allow mounting a file system")
    try:
        for method in ("full", "lora"):
            spec = spec_of(method=method, lora_rank=64)
            model = load_model(small_llama, spec, CPU)
            with pytest.raises(UserError, match=r"tuned: cannot be written .*[Nn]o space left"):
                save_tuned(ParallelModel(model), base_of(small_llama), disk / "tuned", spec)
            assert list(disk.iterdir()) == []
    finally:
        run_bounded(["umount", disk], check=True)


def test_a_full_model_reloads_in_plain_transformers(small_llama: Path, tmp_path: Path):
    """The attention registered for training in the saved config: transformers does not know it."""
    model, spec = load_model(small_llama, spec_of(method="full"), CPU), spec_of(method="full")
    shutil.copytree(small_llama, tmp_path / "base")
    (tmp_path / "base/tokenizer.json").write_text("{}")
    save_tuned(ParallelModel(model), base_of(tmp_path / "base", "tokenizer.json"), tmp_path / "tuned", spec)
    config = (tmp_path / "tuned/config.json").read_text()
    assert "lean_sdpa" not in config and '"use_cache": true' in config and (tmp_path / "tuned/tokenizer.json").exists()
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned", dtype=torch.float32)
    for name, value in model.state_dict().items():
        assert torch.equal(value, back.state_dict()[name]), name


def test_saving_twice_gives_the_same_bytes(small_llama: Path, tmp_path: Path):
    """Different bytes for the same weights would rerun evaluate."""
    for method in ("full", "qlora"):
        spec = spec_of(method=method)
        model = load_model(small_llama, spec, CPU)
        for name in ("a", "b"):
            save_tuned(ParallelModel(model), base_of(small_llama), tmp_path / method / name, spec)
        files = sorted(p.name for p in (tmp_path / method / "a").iterdir())
        assert any(name.endswith(".safetensors") for name in files) and not any(n.endswith(".bin") for n in files)
        for name in files:
            a, b = tmp_path / method / "a" / name, tmp_path / method / "b" / name
            assert a.read_bytes() == b.read_bytes(), name
            # A path in a file would make the bytes those of this checkout.
            assert str(small_llama).encode() not in a.read_bytes(), name
    assert load_file(tmp_path / "qlora/a/adapter_model.safetensors")


@pytest.mark.parametrize("start", ["default", "pissa"])
def test_other_users_may_read_an_adapter_as_its_neighbours(small_llama: Path, tmp_path: Path, start: str):
    """Safetensors' writer makes files of mode 0600, which a server of another user cannot read."""
    spec = spec_of(method="lora", lora_init=start)
    model = load_model(small_llama, spec, CPU)
    save_tuned(ParallelModel(model), base_of(small_llama), tmp_path / "tuned", spec)
    modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "tuned").iterdir()}
    (tmp_path / "plain").touch()
    assert set(modes.values()) == {(tmp_path / "plain").stat().st_mode & 0o777}, modes
    weights = tmp_path / "tuned/adapter_model.safetensors"
    save_file(load_file(weights), tmp_path / "by_safetensors", metadata={"format": "pt"})
    assert (tmp_path / "by_safetensors").read_bytes() == weights.read_bytes()


TURN = [{"role": "user", "content": "Hi"}]


def logits(model: Any, text: str = "One plus two") -> torch.Tensor:
    ids = AutoTokenizer.from_pretrained(TINY_DIRECTORY)(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return model(input_ids=ids).logits


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # Of plain peft.
@pytest.mark.parametrize("method", ["lora", "full"])
def test_saved_model_loads_with_its_template_from_any_directory(method, tmp_path, monkeypatch):
    """A base named as params.yaml names it (`tiny`, a relative path) is found from no other directory."""
    shutil.copytree(TINY_DIRECTORY, tmp_path / "checkout/models/mine")
    (tmp_path / "mine.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "checkout")
    monkeypatch.delenv("DVC_ROOT", raising=False)
    spec = spec_of(method=method)
    model = load_model(TINY_DIRECTORY, spec, CPU)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.01
    tokenizer_files = [one for one in TOKENIZER_FILES if (TINY_DIRECTORY / one).exists()]
    for name, lock, template in (
        ("named", {"kind": "directory", "name": "models/mine"}, tmp_path / "mine.jinja"),
        ("tiny", {"kind": "tiny"}, None),
    ):
        known = base_of(TINY_DIRECTORY, *tokenizer_files)
        base = replace(known, address=model_address(lock), chat_template=template)
        merge = ["config.json", "model.safetensors"] if method == "lora" else None
        changed = FileVersions({TINY_DIRECTORY / "tokenizer.json": (0,)})
        with pytest.raises(UserError, match="tokenizer.json changed while it was read"):
            save_tuned(ParallelModel(model), replace(base, read=changed), tmp_path / name, spec, merge)
        assert not (tmp_path / name).exists()
        save_tuned(ParallelModel(model), base, tmp_path / name, spec, merge)
        with monkeypatch.context() as patch:
            patch.chdir(tmp_path / "elsewhere")
            auto: Any = AutoPeftModelForCausalLM if method == "lora" else AutoModelForCausalLM
            assert torch.allclose(logits(auto.from_pretrained(tmp_path / name, dtype=torch.float32)), logits(model))
            for directory in [tmp_path / name] + ([tmp_path / name / "merged"] if merge else []):
                text = AutoTokenizer.from_pretrained(directory).apply_chat_template(TURN, tokenize=False)
                assert text == ("[Hi]" if template else "<|im_start|>user\nHi<|im_end|>\n")


def test_the_template_of_rows_with_tools_goes_with_the_tokenizer_unless_another_was_trained(tmp_path: Path):
    own = shutil.copytree(TINY_DIRECTORY, tmp_path / "own")
    (own / TOOL_TEMPLATE).parent.mkdir()
    (own / TOOL_TEMPLATE).write_text("{{ messages }}")
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }}")
    base = base_of(own, *(one for one in TOKENIZER_FILES if (own / one).exists()))
    for name, template, kept in (("with", None, True), ("without", tmp_path / "mine.jinja", False)):
        (tmp_path / name).mkdir()
        replace(base, chat_template=template).copy_tokenizer(tmp_path / name)
        assert (tmp_path / name / TOOL_TEMPLATE).exists() == kept


def test_adapter_config_names_a_base_that_outlives_the_run(small_llama: Path, tmp_path: Path, monkeypatch):
    """A temporary experiment's copy is gone after it; a branch of the hub may move on."""
    copy, checkout = tmp_path / "copy", tmp_path / "checkout"
    for root in (copy, checkout):
        (root / "mine").mkdir(parents=True)
        (root / "lean_finetune/tiny").mkdir(parents=True)
    monkeypatch.chdir(copy)
    monkeypatch.setenv("DVC_ROOT", str(checkout))
    assert model_address({"kind": "directory", "name": "mine"}) == str(checkout / "mine")
    assert model_address({"kind": "directory", "name": str(copy / "mine")}) == str(copy / "mine")
    assert model_address({"kind": "tiny"}) == str(checkout / "lean_finetune/tiny")
    address = model_address({"kind": "hub", "name": "org/model"})
    hub = replace(base_of(small_llama), address=address, revision="0123abcd")
    spec = spec_of(method="lora")
    save_tuned(ParallelModel(load_model(small_llama, spec, CPU)), hub, tmp_path / "tuned", spec)
    config = json.loads((tmp_path / "tuned/adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("org/model", "0123abcd")
