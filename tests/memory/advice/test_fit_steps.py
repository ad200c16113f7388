"""`fit` with train.tokens_per_step: auto, its default."""

import json
from pathlib import Path

import pytest

from lean_finetune.commands.fit import fit
from tests.memory.advice.test_fit import workspace
from tests.workspace import invoke

__all__ = ["workspace"]  # A fixture.


@pytest.mark.parametrize(
    ("lengths", "tokens"),
    [
        ([], 65_536),
        (["--lengths", "p50=40,p99=100"], 65_536),  # Of an unknown number of rows.
        (["--lengths", "lengths.txt"], 512),
    ],
)
def test_steps_are_the_largest_unless_rows_are_given(workspace: Path, lengths: list[str], tokens: int):
    """A prediction of gradients that no step accumulates, or none at all."""
    (workspace / "lengths.txt").write_text("40\n" * 500)
    options = ["--model", "model", "--gpu", "T4", "--length", "128", "--set", "bucket.max_tokens=512", *lengths]
    result = invoke(fit, *options, "--json")
    answer = json.loads(result.stdout)
    assert answer["tokens_per_step"] == tokens and "auto" not in invoke(fit, *options, "--verdict").stdout
