"""`lean-finetune fit --from`: what it reads of another tool's configuration on several GPUs."""

import json
from pathlib import Path
from typing import Any

import pytest

from lean_finetune.commands.convert.conversions import Converted
from lean_finetune.commands.convert.read_config import read_config_of_tool
from lean_finetune.commands.fit import fit
from lean_finetune.commands.fit_tool import _keys, _variants
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


def test_one_change_is_tried_with_the_same_rows_on_as_many_gpus(tmp_path: Path):
    """Half of the tokens of a step would halve the micro-batch, and seem to save memory."""
    path = tmp_path / "trl.yaml"
    found = converted(path, TRL, 2)
    tried: list[Converted] = []

    def run_of(changed: Converted) -> Any:
        tried.append(changed)

    assert len(list(_variants(path, found, run_of))) == len(tried) > 2
    assert found.values["train.tokens_per_step"] == 2048
    for changed in tried:
        for key in ("train.tokens_per_step", "bucket.max_tokens", "hardware.num_gpus"):
            assert changed.values[key] == found.values[key]


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
