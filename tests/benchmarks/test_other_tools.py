"""The benchmark of other tools' configurations counts them, and finds one that is read wrongly."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks import other_tools
from lean_finetune.commands.convert.read_config import read_config_of_tool
from tests.commands.tool_configs import (
    AXOLOTL,
    LLAMA_FACTORY,
    LLAMA_FACTORY_V1,
    SWIFT_SHELL,
    SWIFT_YAML,
    TORCHTUNE,
    TRL,
    UNSLOTH,
)

SAMPLES = {
    "axolotl.yml": AXOLOTL,
    "dpo.yml": AXOLOTL.replace("type: alpaca", "type: chatml.intel") + "rl: dpo\n",
    "grpo.yml": AXOLOTL + "rl: grpo\n",
    "factory.yaml": LLAMA_FACTORY,
    "v1.yaml": LLAMA_FACTORY_V1,
    "swift.yaml": SWIFT_YAML,
    "swift.sh": SWIFT_SHELL,
    "tune.yaml": TORCHTUNE,
    "trl.yaml": TRL,
    "unsloth.yaml": UNSLOTH,
    "other.yaml": "gpu: 1\n",
    "other.sh": "echo\n",
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory with a configuration of each tool."""
    for name, text in SAMPLES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_second_reading_agrees_on_the_samples(directory: Path):
    measured = other_tools.measure(False, (directory,))
    counts = {(row["verdict"], row["tool or reason"]): row["files"] for row in measured.rows}
    assert counts.pop(("answered", "ms-swift")) == counts.pop(("answered", "Axolotl")) == 2
    assert counts.pop(("refused", "must be a training configuration of Axolotl")) == 1
    assert counts.pop(("refused", "rl: this kind of training is not done here")) == 1
    assert {verdict for verdict, _ in counts} == {"answered"} and set(counts.values()) == {1} and len(counts) == 5
    assert all(bar.holds for bar in measured.bars)


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("trl.yaml", {"train.precision": "fp16"}, "trl.yaml: precision: fp16 instead of bf16"),
        ("swift.sh", {"train.method": "lora"}, "swift.sh: method: lora instead of full"),
        ("tune.yaml", {"bucket.max_tokens": 512}, "tune.yaml: micro-batch: 512 instead of 1024"),
        ("axolotl.yml", {"data.max_length": 512}, "axolotl.yml: length: 512 instead of 4096"),
    ],
)
def test_a_wrong_reading_is_found(
    name: str, values: dict[str, object], expected: str, directory: Path, monkeypatch: pytest.MonkeyPatch
):
    """A benchmark that compares a reading with itself."""

    def wrong(path: Path, gpus: int, **options: Any) -> object:
        converted = read_config_of_tool(path, gpus, **options)
        if path.name == name:
            converted.values |= values
        return converted

    monkeypatch.setattr(other_tools, "read_config_of_tool", wrong)
    measured = other_tools.measure(False, (directory,))
    assert [row["tool or reason"] for row in measured.rows if row["verdict"] == "wrong"] == [expected]
    assert not all(bar.holds for bar in measured.bars)


def test_an_answer_for_another_kind_of_run_is_wrong(directory: Path, monkeypatch: pytest.MonkeyPatch):
    """An audio run that is answered as one on text."""
    (directory / "dpo.yml").write_text(AXOLOTL + "processor_type: VoxtralProcessor\n")
    answer = read_config_of_tool(directory / "axolotl.yml", gpus=1)
    monkeypatch.setattr(other_tools, "read_config_of_tool", lambda path, gpus, **options: answer)
    assert other_tools.judge(directory / "dpo.yml") == (
        "wrong",
        "answered in spite of: processor_type: VoxtralProcessor",
    )
