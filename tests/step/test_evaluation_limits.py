"""Evaluation limits default to those of training."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from lean_finetune.config.load import load_params
from lean_finetune.step.evaluation_limits import EvaluationLimits
from tests.workspace import lay_out


def limits(
    directory: Path, monkeypatch: pytest.MonkeyPatch, supervised: Sequence[int] = (), **changes: object
) -> EvaluationLimits:
    monkeypatch.chdir(directory)
    lay_out(directory, **changes)
    return EvaluationLimits.from_params(load_params(), np.array(supervised, np.int32))


def test_blank_means_what_training_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An evaluation that ends out of memory where training did not."""
    found = limits(tmp_path, monkeypatch, bucket__max_tokens=768, train__loss_chunk=96)
    assert (found.max_tokens, found.logits_chunk) == (768, 96)
    without_chunk = limits(tmp_path, monkeypatch, bucket__max_tokens=768, train__loss_chunk=None)
    assert (without_chunk.max_tokens, without_chunk.logits_chunk) == (768, 768)
    given = limits(tmp_path, monkeypatch, evaluate__max_tokens=2048, evaluate__logits_chunk=32)
    assert (given.max_tokens, given.logits_chunk) == (2048, 32)


def test_prompts_are_counted_with_their_answers():
    """A KV cache that outgrows the budget while answers are made, or a batch of none."""
    given = EvaluationLimits(max_tokens=100, logits_chunk=9, max_new_tokens=10, generate_batch_rows=4)
    assert [given.prompts_at_once(length) for length in (1, 15, 16, 40, 41, 90, 91, 500)] == [4, 4, 3, 2, 1, 1, 1, 1]


@pytest.mark.parametrize(("supervised", "tokens"), [([9, 40, 7], 40), ([9, 3000], 256), ([], 256)])
def test_blank_answers_are_as_long_as_those_of_the_rows(
    tmp_path: Path, monkeypatch, supervised: list[int], tokens: int
):
    """Answers of 100 to 500 tokens, of which the first 64 were shown."""
    assert limits(tmp_path, monkeypatch, supervised, evaluate__max_new_tokens=None).max_new_tokens == tokens
    assert limits(tmp_path, monkeypatch, supervised, evaluate__max_new_tokens=64).max_new_tokens == 64
