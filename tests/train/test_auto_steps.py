"""train.tokens_per_step: auto through the stages: estimate and train read what bucket chose."""

import csv
from pathlib import Path

import pytest

from lean_finetune.core.atomic_files import read_json
from stages.bucket import main as bucket
from stages.estimate import main as estimate
from stages.pin import main as pin
from stages.reference import main as reference
from stages.tokenize import main as tokenize
from stages.train import main as train
from tests.data.common import chat_row
from tests.workspace import invoke, lay_out, write_rows

SMALL = {
    "data__source": "rows.jsonl",
    "data__max_length": 128,
    "bucket__max_tokens": 256,
    "train__method": "lora",
    "train__heldout_every_steps": None,
    "run__cpu_threads": 1,
    "run__data_workers": 1,
    "run__tokenizer_engine": "tokenizers",
}
ROWS = [chat_row(f"What is {n} plus {n}?", f"{n} plus {n} is {2 * n}. " * (1 + n % 5)) for n in range(150)]


@pytest.mark.slow
def test_auto_is_predicted_and_trained_as_the_number_that_it_stands_for(tmp_path: Path, monkeypatch):
    """Stages that each choose a number of their own; a prediction for 65,536 tokens; `auto` in arithmetic."""
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl", ROWS)
    found = []
    for tokens in ("auto", None):
        value = tokens or read_json(Path("data/batches/figures.json"))["tokens_per_step"]
        lay_out(tmp_path, **SMALL, train__tokens_per_step=value)
        for what in ("data", "model"):
            assert invoke(pin, what).exit_code == 0
        for stage in (tokenize, bucket, estimate, reference, train):
            result = invoke(stage)
            assert result.exit_code == 0, result.output
        weights = Path("data/tuned/adapter_model.safetensors").read_bytes()
        with Path("data/train/curves.csv").open() as file:
            steps = len(list(csv.DictReader(file)))
        found.append((read_json(Path("data/estimate/figures.json"))["peak_bytes_predicted"], weights, steps))
    auto, number = found
    assert auto == number and auto[2] >= 95
