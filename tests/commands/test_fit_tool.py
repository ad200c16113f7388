"""`lean-finetune fit --from`: what it reads of another tool's configuration on several GPUs."""

import json
from pathlib import Path
from typing import Any

import pytest

from lean_finetune.commands.convert.conversions import Converted
from lean_finetune.commands.convert.read_config import read_config_of_tool
from lean_finetune.commands.fit import fit
from lean_finetune.commands.fit_tool import _keys, _variant
from lean_finetune.memory.choice.tool_changes import AXOLOTL_ADAPTER, CUT_CROSS_ENTROPY, changes_of
from tests.workspace import invoke

TRL = """
model_name_or_path: a/b
dataset_name: c/d
per_device_train_batch_size: 2
max_length: 512
bf16: true
learning_rate: 1e-5
"""


def converted(path: Path, text: str, gpus: int) -> Converted:
    path.write_text(text)
    return read_config_of_tool(path, gpus, with_data=False)


def test_changes_keep_the_rows_of_a_step_on_as_many_gpus(tmp_path: Path):
    """Half of the tokens of a step would halve the micro-batch, and seem to save memory."""
    path = tmp_path / "trl.yaml"
    found = converted(path, TRL, 2)
    tried: list[Converted] = []

    def run_of(changed: Converted) -> Any:
        tried.append(changed)

    changes = [one for one in changes_of("TRL", found.keys, 2) if one.about != "length"]
    for change in changes:
        _variant(path, 2, run_of, change.keys)
    assert {"rows", "loss", "optimizer", "sharding", "weights"} <= {change.about for change in changes}
    assert found.values["train.tokens_per_step"] == 2048
    for change, changed in zip(changes, tried, strict=True):
        for key in ("train.tokens_per_step", "hardware.num_gpus"):
            assert changed.values[key] == found.values[key]
        smaller = change.about == "rows"
        assert changed.values["bucket.max_tokens"] == found.values["bucket.max_tokens"] // (2 if smaller else 1)


def test_changes_that_the_configuration_has_are_left_out():
    """An offer with keys that are there already hides those that matter."""
    keys = {"use_peft": True, "load_in_8bit": True, "gradient_checkpointing": True, "optim": "adamw_8bit"}
    found = {change.about: change.keys for change in changes_of("TRL", keys, 1)}
    assert found["weights"] == {"load_in_4bit": True, "load_in_8bit": False}
    assert not {"checkpointing", "optimizer", "sharding", "rows", "length"} & found.keys()


def test_a_deepspeed_configuration_inside_is_read(tmp_path: Path):
    path = tmp_path / "trl.yaml"
    found = converted(path, TRL + "deepspeed:\n  zero_optimization: {stage: 2, offload_optimizer: {device: cpu}}\n", 2)
    expected = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    assert _keys(found, path)["deepspeed"] == expected


def test_deepspeed_inside_a_configuration_shares_the_run_here_too(tmp_path: Path):
    """The figure for here was that of DDP, beside one of ZeRO-3 there."""
    inside = "deepspeed:\n  zero_optimization: {stage: 3, offload_optimizer: {device: cpu}, overlap_comm: true}\n"
    found = converted(tmp_path / "trl.yaml", TRL + inside, 2)
    assert found.values["train.sharding"] == "zero3" and found.values["train.offload"] == "parameters"
    assert found.unknown == []


@pytest.mark.parametrize(
    ("line", "message"),
    [("dtype: [bfloat16]", "dtype: must be one of float32, "), ("fsdp: full_shard\nfsdp_version: [2]", "fsdp_version")],
)
def test_a_value_of_another_type_has_no_figure(tmp_path: Path, line: str, message: str):
    """A list counted as 16 bits, or as FSDP1."""
    result = invoke(fit, "--from", write(tmp_path, TRL + line), "--gpus", "2", "--gpu", "A100-80GB", "--json")
    assert json.loads(result.stdout)["as_tool"]["not_known"].startswith(message)


def test_a_date_in_a_configuration_is_text_in_the_answer(tmp_path: Path):
    """YAML reads an unquoted date as one, which JSON does not have."""
    config = write(tmp_path, TRL + "run_name: 2026-01-01\n")
    result = invoke(fit, "--from", config, "--gpu", "A100-80GB", "--json")
    assert json.loads(result.stdout)["from"]["keys"]["run_name"] == "2026-01-01"


def write(directory: Path, text: str) -> str:
    """A configuration of the shipped model."""
    path = directory / "trl.yaml"
    path.write_text(text.replace("a/b", "tiny") + "\n")
    return str(path)


@pytest.mark.parametrize(
    ("tool", "keys", "about", "expected"),
    [
        ("TRL", {"torch_dtype": "float32"}, "type", [{"torch_dtype": "bfloat16"}]),
        ("TRL", {"deepspeed": "mine.json"}, "sharding", []),
        ("LitGPT", {"train.micro_batch_size": 3}, "rows", [{"train.micro_batch_size": 1}]),
        ("torchtune", {"batch_size": 4, "gradient_accumulation_steps": 1, "optimizer_in_bwd": True}, "rows", []),
        ("torchtune", {"optimizer.fused": True}, "optimizer", []),
        (
            "Axolotl",
            {"plugins": ["liger"], "cut_cross_entropy": True},
            "loss",
            [{"plugins": ["liger", CUT_CROSS_ENTROPY]}],
        ),
        (
            "Axolotl",
            {"adapter": "lora", "lora_r": 8, "lora_target_modules": ["q_proj"]},
            "weights",
            [{"adapter": "qlora", "load_in_4bit": True}],
        ),
        ("Axolotl", {}, "weights", [{"adapter": "qlora", "load_in_4bit": True, **AXOLOTL_ADAPTER}]),
    ],
)
def test_changes_stand_beside_the_other_keys(tool: str, keys: dict[str, Any], about: str, expected: list[Any]):
    """A second name of one setting, a list that loses its plugin, or arguments that the tool refuses together."""
    assert [dict(one.keys) for one in changes_of(tool, keys, 2) if one.about == about] == expected


SMALL = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
FULL = """
model_name_or_path: {model}
finetuning_type: full
dataset: a
template: llama3
cutoff_len: 2048
per_device_train_batch_size: 8
gradient_accumulation_steps: 2
learning_rate: 1.0e-5
bf16: true
flash_attn: fa2
resume_from: x
"""


def configured(tmp_path: Path) -> Path:
    """Full fine-tuning of a small model in LLaMA-Factory, whose logits are most of the memory."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(SMALL))
    path = tmp_path / "full.yaml"
    path.write_text(FULL.format(model=tmp_path / "model"))
    return path


def test_a_run_that_does_not_fit_there_says_first_which_of_its_own_keys_to_change(tmp_path: Path):
    """One change alone, which did not fit either, stood behind 60 lines about this tool."""
    path = configured(tmp_path)
    result = invoke(fit, "--from", str(path), "--gpu", "6GiB")
    screen = result.output.splitlines()[:25]
    assert screen[0].startswith("as that tool runs it does not fit in LLaMA-Factory: needs ")
    place = next(number for number, line in enumerate(screen) if line.startswith("what fits there"))
    assert "gradient_accumulation_steps: " in screen[place + 1] and "per_device_train_batch_size: " in screen[place + 1]
    assert "fits, about" in screen[place + 2] and screen[place + 2].endswith("same training result")
    assert any(line.startswith("as it would run here") for line in screen)
    assert "→ train.lr" not in result.output
    assert "resume_from; --keys lists them" in result.output
