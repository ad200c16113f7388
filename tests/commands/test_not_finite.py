"""Weights with NaN or infinity: no command answers with them, or writes them."""

import json
import shutil
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lean_finetune.commands.chat import chat
from lean_finetune.commands.export import export
from lean_finetune.commands.generate import generate
from lean_finetune.core.errors import UserError
from lean_finetune.model.files.finite_values import FiniteTensor, copy_finite, is_finite, of_model
from lean_finetune.model.files.quantized_checkpoint import AsStored
from lean_finetune.pinning.locate import TINY_DIRECTORY
from tests.workspace import error, invoke, write_rows

BASE, ADAPTER = "model.safetensors", "adapter_model.safetensors"
NORM, A = (
    "model.layers.1.post_attention_layernorm.weight",
    "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
)
SAYS = "has values that are not finite (NaN or infinity)"


def poison(file: Path, name: str, value: float, every: bool = False) -> None:
    """Write a value into a tensor of a file, at one place or everywhere."""
    tensors = load_file(file)
    tensors[name].view(-1)[slice(None) if every else slice(5, 6)] = value
    save_file(tensors, file, {"format": "pt"})


@pytest.fixture
def parts(adapter: Path, tmp_path: Path) -> dict[str, Path]:
    """Copies of a full model, and of an adapter whose base it is."""
    base, own = shutil.copytree(TINY_DIRECTORY, tmp_path / "base"), shutil.copytree(adapter, tmp_path / "adapter")
    config = json.loads((own / "adapter_config.json").read_text())
    (own / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": str(base)}))
    return {"base": base, "adapter": own}


@pytest.mark.parametrize(
    ("part", "name", "value", "model", "command", "words"),
    [
        ("base", NORM, nan, "adapter", export, ()),
        ("base", NORM, inf, "base", export, ()),
        ("adapter", A, inf, "adapter", export, ()),
        ("adapter", A, nan, "adapter", export, ("--what", "adapter")),
        ("base", NORM, nan, "base", generate, ()),
        ("base", NORM, -inf, "adapter", generate, ("--bits", "16")),
        ("base", "model.layers.0.mlp.up_proj.weight", nan, "adapter", generate, ("--bits", "4")),
        ("adapter", A, nan, "adapter", chat, ("--bits", "16")),
    ],
)
def test_a_tensor_that_is_not_finite_is_named(
    parts: dict[str, Path], tmp_path: Path, part: str, name: str, value: float, model: str, command: Any, words: Any
):
    """`export` wrote it with exit code 0, and `generate` answered with an empty text."""
    poison(parts[part] / (BASE if part == "base" else ADAPTER), name, value)
    before = sorted(tmp_path.iterdir())
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": "a"}])
    given = {generate: (str(prompts), str(tmp_path / "answers")), export: (str(tmp_path / "out"),)}.get(command, ())
    line = error(invoke(command, *given, "--model", str(parts[model]), *words))
    assert line.startswith(f"--model: {parts[part]}") and SAYS in line
    assert f": {name.removesuffix('.weight')}" in line and "; download or save it again" in line
    assert sorted(tmp_path.iterdir()) == sorted([*before, prompts])


def test_a_merge_whose_values_are_too_large_is_refused(parts: dict[str, Path], tmp_path: Path):
    """Finite weights whose product is not: the merged model had infinite ones."""
    for side in "AB":
        poison(parts["adapter"] / ADAPTER, A.replace("lora_A", f"lora_{side}"), 1e30, every=True)
    line = error(invoke(export, str(tmp_path / "out"), "--bits", "16", "--model", str(parts["adapter"])))
    assert line.startswith(f"--model: model.layers.0.self_attn.q_proj.weight {SAYS} as ")
    assert not (tmp_path / "out").exists()


def test_an_activated_adapter_is_refused(parts: dict[str, Path], tmp_path: Path):
    """It was merged, and is another model then: it works only after certain tokens."""
    path = parts["adapter"] / "adapter_config.json"
    config = json.loads(path.read_text())
    no_tokens: list[Any] = [[], None]
    for tokens in no_tokens:
        path.write_text(json.dumps({**config, "alora_invocation_tokens": tokens}))
        assert invoke(export, str(tmp_path / f"{tokens}"), "--model", str(parts["adapter"])).exit_code == 0
    path.write_text(json.dumps({**config, "alora_invocation_tokens": [5, 6]}))
    line = error(invoke(export, str(tmp_path / "out"), "--model", str(parts["adapter"])))
    assert "adapter_config.json is that of an activated LoRA (alora_invocation_tokens)" in line


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_every_type_and_place_is_seen(dtype: torch.dtype, size: int):
    """A vectorised reduction that skips NaN at the end of a tensor."""
    for place in {0, size // 2, size - 1}:
        for value in (nan, inf, -inf):
            tensor = torch.ones(size).to(dtype)
            assert is_finite(tensor)
            tensor[place] = torch.tensor(value).to(dtype)
            assert not is_finite(tensor)
    assert is_finite(torch.tensor([], dtype=dtype)) and is_finite(torch.tensor([2**62]))


def test_scales_of_packed_weights_are_checked():
    """A 4-bit weight with scales of NaN."""

    class Packed:
        path = Path("model.safetensors")

        def __getitem__(self, index: Any) -> AsStored:
            return AsStored({"weight": torch.ones(4, dtype=torch.uint8), "weight.absmax": torch.tensor([1.0, nan])})

    packed: Any = Packed()
    with pytest.raises(UserError, match=r"^model.name: model.safetensors: a.weight has values that are not finite"):
        FiniteTensor("a.weight", packed)[...]


def test_a_checked_copy_has_the_same_bytes(tmp_path: Path):
    """A header that is written anew loses the metadata."""
    tensors = {"b": torch.ones(3, dtype=torch.int64), "empty": torch.ones(0), "a": torch.ones(5, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "a", {"format": "pt", "more": "text"})
    copy_finite(tmp_path / "a", tmp_path / "b", of_model(tmp_path / "a"))
    assert (tmp_path / "b").read_bytes() == (tmp_path / "a").read_bytes()
