"""`fit --from` for runs that another tool takes, and that are refused here as they stand."""

import json
from pathlib import Path
from typing import Any

import pytest

from lean_finetune.commands.fit import fit
from tests.workspace import invoke

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
}
AXOLOTL = """
base_model: {model}
adapter: lora
lora_r: 8
lora_alpha: 16
lora_target_modules: [{targets}]
datasets: [{{path: a/b, type: chat_template}}]
sequence_len: 1024
sample_packing: {packing}
micro_batch_size: 1
num_epochs: 1
optimizer: adamw_torch
learning_rate: 1e-4
bf16: true
"""
LITGPT = """
checkpoint_dir: {model}
precision: bf16-true
lora_r: 8
lora_query: true
lora_head: true
train: {{micro_batch_size: 1, global_batch_size: 2, max_seq_length: 256}}
"""


def answer(tmp_path: Path, text: str, config: dict[str, Any], **values: str) -> dict[str, Any]:
    """The answer as JSON for a configuration of a model with this config.json."""
    (tmp_path / "model").mkdir(exist_ok=True)
    (tmp_path / "model" / "config.json").write_text(json.dumps({**SIZES, **config}))
    path = tmp_path / "run.yaml"
    path.write_text(text.format(model=tmp_path / "model", **values))
    result = invoke(fit, "--from", str(path), "--gpu", "RTX-4090", "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_names_that_match_no_layer_are_left_out_as_peft_does(tmp_path: Path):
    """Axolotl's example of arcee names gate_proj, which its layers do not have."""
    found = answer(tmp_path, AXOLOTL, {"model_type": "arcee"}, targets="gate_proj, up_proj, down_proj", packing="false")
    assert found["params"]["train"]["lora"]["targets"] == ["up_proj", "down_proj"]
    assert "arcee has no gate_proj: peft leaves such names out, and so it is here" in found["from"]["differs"]
    assert found["as_tool"]["verdict"] == "fits"


@pytest.mark.parametrize(
    "config", [{"model_type": "gpt_oss", "head_dim": 16, "num_local_experts": 4}, {"model_type": "stablelm"}]
)
def test_rows_that_are_packed_there_alone_are_padded_here(tmp_path: Path, config: dict[str, Any]):
    found = answer(tmp_path, AXOLOTL, config, targets="q_proj, v_proj", packing="true")
    packed = found["params"]["bucket"]["mode"] == "packed"
    said = any("rows are packed there, and padded here" in text for text in found["from"]["differs"])
    assert found["as_tool"]["verdict"] == "fits" and said != packed


def test_an_adapter_of_a_tied_head_is_counted_in_the_tool_alone(tmp_path: Path):
    """LitGPT keeps the head apart from the embedding."""
    tied: dict[str, Any] = {"model_type": "llama", "tie_word_embeddings": True}
    found = answer(tmp_path, LITGPT, tied)
    alone = answer(tmp_path, LITGPT.replace("lora_head: true", "lora_head: false"), tied)
    assert "the head of llama is its embedding here, so it has no adapter" in found["from"]["differs"]
    assert found["params"]["train"]["lora"]["targets"] == ["q_proj"]
    assert found["peak_bytes"] == alone["peak_bytes"]
    assert found["as_tool"]["phases"]["loading"] > alone["as_tool"]["phases"]["loading"]
