"""`lean-finetune export`: a tuned model that other libraries load with the same answers, on disk and on the hub."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from lean_finetune.commands.export import export, vllm_adapter_line, write_export
from lean_finetune.commands.tuned.conversation import Prompter, modelfile, role_frames
from lean_finetune.commands.tuned.tuned_model import find_tuned
from lean_finetune.core.errors import UserError
from lean_finetune.pinning.locate import TINY_DIRECTORY
from tests.pinning.hub_server import COMMIT, serve, use_hub
from tests.small_model import CPU
from tests.workspace import error, invoke

WEIGHTS = "model.safetensors"
TUNED = ["--bits", "16", "--model"]


def logits(model: Any, directory: Path) -> torch.Tensor:
    """Of a short text, fp32."""
    ids = AutoTokenizer.from_pretrained(directory)("Hello, world", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return model.eval()(ids).logits


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # Read by peft.
def test_transformers_and_peft_load_what_was_exported_with_equal_logits(adapter: Path, tmp_path: Path):
    """Files that only this project reads, or a merged model that answers as its base does."""
    for what in ("merged", "adapter"):
        result = invoke(export, str(tmp_path / what), *TUNED, str(adapter), "--what", what)
        assert result.exit_code == 0, result.output
    adapted = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", dtype=torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(TINY_DIRECTORY, dtype=torch.float32)
    expected = logits(adapted, adapter)
    found = logits(merged, tmp_path / "merged")
    # The merged weights are rounded to the type of the base's files.
    assert (found - expected).abs().max() < 0.1 * (logits(base, adapter) - expected).abs().max()
    assert load_file(tmp_path / "merged" / WEIGHTS)["model.norm.weight"].dtype == base.config.dtype or torch.float32
    files = {path.name for path in (tmp_path / "merged").iterdir()}
    assert {"README.md", "Modelfile", "chat_template.jinja", "tokenizer.json", "generation_config.json"} < files


def test_the_output_has_the_lines_that_load_it(adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A page of documentation to read before the model can be used."""
    monkeypatch.chdir(tmp_path)
    shown = invoke(export, "my model", *TUNED, str(adapter)).stdout
    assert "vllm serve 'my model'\n" in shown and "--outfile 'my model/model.gguf' && llama-cli -m 'my model/" in shown
    assert "ollama create 'my model' -f 'my model/Modelfile'" in shown
    shown = invoke(export, "adapter", *TUNED, str(adapter), "--what", "adapter").stdout
    options = "--tokenizer adapter --enable-lora --max-lora-rank 8 --lora-modules adapter=adapter"
    assert f"vllm serve {TINY_DIRECTORY} {options}\n" in shown


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"r": 33}, "--max-lora-rank 64 "),  # vLLM refuses other values.
        ({"r": 8, "rank_pattern": {"experts": 200}}, "--max-lora-rank 256 "),
        ({"r": 8, "revision": COMMIT}, f" --revision {COMMIT} "),
        ({"r": 8, "use_dora": True}, "does not load DoRA as an adapter"),
        ({"r": 600}, "does not load ranks above 512"),
    ],
)
def test_the_line_for_vllm_is_one_that_it_takes(config: dict[str, Any], expected: str, adapter: Path):
    """A server that ends with an error about its options, or serves other weights of the base."""
    tuned = replace(find_tuned(adapter, "16"), adapter={"base_model_name_or_path": "org/base", **config})
    assert expected in vllm_adapter_line(tuned, "adapter")


def test_the_modelfile_takes_the_gguf_file_where_ollama_cannot_convert(adapter: Path):
    """`ollama create` that ends with `unsupported architecture`."""
    lines = modelfile(Prompter(adapter), 100, "Qwen3ForCausalLM").splitlines()
    assert "FROM ./model.gguf" in lines and "FROM ." not in lines


def test_the_modelfile_renders_conversations_as_the_model_was_trained(adapter: Path, tmp_path: Path):
    """Ollama with another chat template than training's, which answers badly without an error."""
    invoke(export, str(tmp_path / "out"), *TUNED, str(adapter))
    lines = (tmp_path / "out/Modelfile").read_text().splitlines()
    assert lines[0] == "FROM ." and 'PARAMETER stop "<|im_end|>"' in lines
    assert 'TEMPLATE """{{ range .Messages }}{{ if eq .Role "system" }}<|im_start|>system' in lines
    for name, expected in {
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}<assistant>": True,
        "{% for m in messages %}<{{ m.role }}>{{ m.content | upper }}</>{% endfor %}<assistant>": False,
        "{% for m in messages %}{{ loop.index }}<{{ m.role }}>{{ m.content }}</>{% endfor %}<assistant>": False,
    }.items():
        (tmp_path / "out/chat_template.jinja").write_text(name)
        assert (role_frames(Prompter(tmp_path / "out")) is not None) == expected


def test_push_uploads_what_was_written_with_the_pinned_base(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A public repository by accident, an adapter that names a path of this machine, or a card without its base."""
    files = {path.name: path.read_bytes() for path in TINY_DIRECTORY.iterdir()}
    of_hub = tmp_path / "of_hub"
    of_hub.mkdir()
    for path in adapter.iterdir():
        (of_hub / path.name).write_bytes(path.read_bytes())
    config = json.loads((adapter / "adapter_config.json").read_text())
    config |= {"base_model_name_or_path": "org/base", "revision": COMMIT}
    (of_hub / "adapter_config.json").write_text(json.dumps(config))
    with serve({"models/org/base": files}) as hub:
        use_hub(monkeypatch, hub, tmp_path / "cache")
        result = invoke(export, str(tmp_path / "out"), *TUNED, str(of_hub), "--what", "adapter", "--push", "me/tuned")
    assert result.exit_code == 0, result.output
    assert hub.private == {"me/tuned": True} and f"hub:          {hub.url}/me/tuned/commit/" in result.stdout
    uploaded = hub.repositories["models/me/tuned"]
    assert uploaded == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    card = uploaded["README.md"].decode()
    assert "from_pretrained('me/tuned')" in card and "library_name: peft" in card
    assert "base_model: org/base" in card and COMMIT in card
    refusal = error(
        invoke(export, str(tmp_path / "new"), *TUNED, str(adapter), "--what", "adapter", "--push", "me/tuned"), 2
    )
    assert refusal.startswith("--push: the adapter's base is the local directory") and not (tmp_path / "new").exists()


@pytest.mark.parametrize("what", ["adapter", "merged"])
def test_a_model_that_is_replaced_while_it_is_read_is_refused(what: str, adapter: Path, tmp_path: Path):
    """`dvc repro` replaces data/tuned meanwhile: weights of one run with the config of another."""
    directory = Path(shutil.copytree(adapter, tmp_path / "tuned"))
    tuned = find_tuned(directory, "16")
    shutil.copytree(adapter, tmp_path / "new")
    directory.rename(tmp_path / "old")
    (tmp_path / "new").rename(directory)
    for use in (lambda: tuned.load(CPU), lambda: write_export(tuned, tmp_path / "out", what, "mine")):
        with pytest.raises(UserError, match=r"^--model: .* changed while it was read; run the command again$"):
            use()
    assert not (tmp_path / "out").exists()


def test_a_directory_with_files_is_not_replaced(adapter: Path, tmp_path: Path):
    """The user's files deleted by `export .`."""
    (tmp_path / "mine.txt").write_text("text")
    refusal = error(invoke(export, str(tmp_path), *TUNED, str(adapter)), 2)
    assert refusal.endswith("must be a new or an empty directory; name another") and (tmp_path / "mine.txt").exists()
