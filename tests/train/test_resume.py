"""A run that was broken off and gone on with ends as one that was not: same weights, losses and metrics."""

from pathlib import Path

import pytest

from tests.train.interrupted import finish, in_parts, small_job

FAST = [("lora", "adamw"), ("qlora", "paged_adamw_8bit"), ("full", "adafactor")]


@pytest.mark.parametrize(("method", "optimizer"), FAST)
def test_a_run_in_three_parts_is_the_run_in_one(small_llama: Path, tmp_path: Path, method: str, optimizer: str):
    """Weights, losses, memory figures: not a bit may tell that the process ended twice."""
    job = small_job(small_llama, tmp_path / "tokens", method=method, lora_dropout=0.1, optim={"name": optimizer})
    whole = finish(job)
    assert in_parts(job, tmp_path / "kept", [1, 3]) == whole
