"""The GPU's benchmark of speed, proven with the CPU as a stand-in device."""

import json
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from benchmarks.gpu import train
from benchmarks.gpu.run import random_model
from benchmarks.gpu.speed_cases import (
    CASES,
    LORA_4096,
    PEAK_FLOPS,
    QLORA_LEAST,
    SMALL_CASES,
    bars_of,
    flops_per_token,
)
from lean_finetune.core.units import GIB
from lean_finetune.memory.predict.peak import predict
from lean_finetune.memory.predict.state_formulas import model_shapes
from tests.memory.common import gpu_target
from tests.small_model import CPU


def test_it_times_writes_after_each_configuration_and_goes_on(tmp_path, monkeypatch):
    """Figures lost when the machine is taken away, or measured twice; TRL's absence told as its speed."""
    out = tmp_path / "gpu.json"
    monkeypatch.setattr(train, "WARM_UP_STEPS", 1)
    monkeypatch.setattr(train, "TIMED_STEPS", 2)

    def run(*more: str) -> str:
        given = ["--device", "cpu", "--out", str(out), "--commit", "one", "--trl-python", "/bin/false", *more]
        done = CliRunner().invoke(train.main, given)
        assert done.exit_code == 0, done.output
        return done.output

    assert f"0 configurations, {len(SMALL_CASES)} left" in run("--minutes", "0")
    assert "all done" in run()
    written = json.loads(out.read_text())
    assert [row["name"] for row in written["rows"]] == [case.name for case in SMALL_CASES]
    for row in written["rows"]:
        assert len(row["seconds"]) == 2 and row["tokens_per_s"] > 0 and row["mfu_percent"] >= 0
        assert row["trl"] == "no output" and "trl_tokens_per_s" not in row
    monkeypatch.setattr(train, "ours", lambda case, device: pytest.fail("measured twice"))
    run()


def test_a_case_without_room_is_told_and_the_next_one_runs(monkeypatch):
    """A run that ends with its first case that is too large."""

    def full(case, device):
        raise torch.OutOfMemoryError("CUDA out of memory.\nmore")

    monkeypatch.setattr(train, "_timed", full)
    assert train.ours(SMALL_CASES[0], CPU) == {"name": SMALL_CASES[0].name, "out_of_memory": "CUDA out of memory."}


def test_arithmetic_is_counted_by_hand():
    """MFU told too high: a frozen weight counted as trained, or the input embedding, of which a row is looked up."""
    lora, full, qlora = SMALL_CASES
    hidden, wide, vocabulary, layers = 64, 128, 256, 2
    linear = layers * (2 * hidden * hidden + 2 * hidden * hidden // 2 + 3 * hidden * wide) + hidden * vocabulary
    norms = (2 * layers + 1) * hidden
    scores = 6 * layers * hidden * 64
    model = random_model(full.config, full.setting.model, CPU)
    assert flops_per_token(model, full) == 6 * (linear + norms) + scores
    adapted = random_model(lora.config, lora.setting.model, CPU)
    adapters = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert flops_per_token(adapted, lora) == 4 * linear + 6 * adapters + scores
    packed = random_model(qlora.config, qlora.setting.model, CPU)
    assert flops_per_token(packed, qlora) == flops_per_token(adapted, lora)


def test_arithmetic_of_8b_is_that_of_its_weights():
    """4 FLOP for each of 7.5 billion frozen weights a token, attention apart: 3 percent of it at 4096 tokens."""
    case = CASES[0]
    layers = case.config.num_hidden_layers
    counted = 4 * (model_shapes(case.config).values - 128256 * 4096) + 6 * layers * 4096 * 4096
    assert 30e9 < counted < 34e9


def test_the_least_case_is_predicted_within_its_bar():
    """A promise of 7.4 GiB that the prediction of the same commit does not hold."""
    case = next(case for case in CASES if case.name == QLORA_LEAST)
    peak = predict(case.config, case.setting, ((case.shape,),), gpu_target("H100")).peak.bytes
    assert peak / GIB < 7.4


def test_bars_are_held_against_what_was_measured():
    """A promise that cannot fail, or one told of a case that did not run."""
    fast = {"tokens_per_s": 13_000.0, "mfu_percent": 42.0, "allocated_bytes": 100, "reserved_bytes": 104}
    rows: dict[str, dict[str, Any]] = {
        LORA_4096: {**fast, "trl_tokens_per_s": 10_000.0},
        "other": {"name": "other", "out_of_memory": "so"},
    }
    bars = {name: (value, rule, limit) for name, value, rule, limit in bars_of(rows, PEAK_FLOPS / 2)}
    assert bars[f"{LORA_4096}: tokens/s"] == (13_000.0, ">=", 12_473 / 2)
    assert bars[f"{LORA_4096}: ours / TRL"] == (1.3, ">=", 1.2)
    assert bars[f"{LORA_4096}: reserved / allocated"] == (1.04, "<=", 1.05)
    assert not any(name.startswith("other") for name in bars)


@pytest.mark.gpu
def test_a_small_case_on_the_gpu():
    """The benchmark broken where it matters."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    row = train.ours(SMALL_CASES[0], torch.device("cuda"))
    assert row["reserved_bytes"] >= row["allocated_bytes"] > 0
