"""Saving: whole or not at all, and in a form that others load."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from stages.errors import UserError
from stages.model.load import load_model
from stages.step.team import Alone
from stages.train.save import save_tuned
from tests.processes import run_bounded
from tests.small_model import CPU, spec_of


def test_a_full_disk_while_saving_is_told_and_leaves_nothing_half(small_llama: Path, tmp_path: Path):
    """Safetensors raises an error of its own there; a trained model must not end in a traceback."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = run_bounded(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk])
    if mounted.returncode:
        pytest.skip("this machine lets nobody mount a file system here")
    try:
        for method in ("full", "lora"):
            model = load_model(small_llama, spec_of(method=method, lora_rank=64), CPU)
            with pytest.raises(UserError, match=r"tuned: cannot be written .*[Nn]o space left"):
                save_tuned(Alone(model), "base", small_llama, [], disk / "tuned")
            assert list(disk.iterdir()) == []
    finally:
        run_bounded(["umount", disk], check=True)


def test_a_full_model_reloads_in_plain_transformers(small_llama: Path, tmp_path: Path):
    """Our registered attention is a matter of training: the saved config must not ask for it."""
    model = load_model(small_llama, spec_of(method="full"), CPU)
    (tmp_path / "base").mkdir()
    (tmp_path / "base/tokenizer.json").write_text("{}")
    save_tuned(Alone(model), "base", tmp_path / "base", ["tokenizer.json"], tmp_path / "tuned")
    config = (tmp_path / "tuned/config.json").read_text()
    assert "lean_sdpa" not in config and '"use_cache": true' in config and (tmp_path / "tuned/tokenizer.json").exists()
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned", dtype=torch.float32)
    for name, value in model.state_dict().items():
        assert torch.equal(value, back.state_dict()[name]), name


def test_saving_twice_gives_the_same_bytes(small_llama: Path, tmp_path: Path):
    """Different bytes for the same weights would rerun evaluate."""
    for method in ("full", "qlora"):
        model = load_model(small_llama, spec_of(method=method), CPU)
        for name in ("a", "b"):
            save_tuned(Alone(model), "base", small_llama, [], tmp_path / method / name)
        files = sorted(p.name for p in (tmp_path / method / "a").iterdir())
        assert any(name.endswith(".safetensors") for name in files) and not any(n.endswith(".bin") for n in files)
        for name in files:
            a, b = tmp_path / method / "a" / name, tmp_path / method / "b" / name
            assert a.read_bytes() == b.read_bytes(), name
            # A path in a file would make the bytes those of this checkout.
            assert str(small_llama).encode() not in a.read_bytes(), name
    assert load_file(tmp_path / "qlora/a/adapter_model.safetensors")
