"""`lean-finetune fit --from`: what it reads of another tool's configuration on several GPUs."""

from pathlib import Path
from typing import Any

from lean_finetune.commands.convert.conversions import Converted
from lean_finetune.commands.convert.read_config import read_config_of_tool
from lean_finetune.commands.fit_tool import _keys, _variants

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
