"""The loss of rows with weights: that of repeated rows, in any micro-batches."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lean_finetune.rows.batch_part import weights_of
from lean_finetune.step.batches import Batch, TokenPart, collate, part_of, with_parts
from lean_finetune.step.loss import summed_loss
from lean_finetune.step.step_loss import StepGoal
from lean_finetune.step.token_rows import TokenRows
from lean_finetune.weights.attachment import WeightAttachment
from tests.kit.loaded import load_model
from tests.small_model import CPU, spec_of
from tests.step.common import rows as plain_rows
from tests.step.common import slow
from tests.token_files import write_tokens
from tests.train.interrupted import finish, in_parts, interrupt, small_job, with_weights

WEIGHTS = [1, 3, 2, 1, 4, 2, 1, 5]
REPEATED = np.repeat(np.arange(len(WEIGHTS)), WEIGHTS)
CASES: list[Any] = [("lora", 16, False), ("full", 16, True), ("full", None, False), slow("qlora", 7, True)]


@pytest.fixture
def tokens(tmp_path: Path) -> TokenRows:
    given = [(ids.tolist(), spans.ravel().tolist(), None) for ids, spans in plain_rows()]
    return TokenRows(write_tokens(tmp_path, given), "train")


def weighted(tokens: TokenRows, weights: Any = WEIGHTS) -> TokenRows:
    tokens.attached = (WeightAttachment(weights=np.array(weights, np.float32)),)
    return tokens


def batch_of(tokens: TokenRows, rows: np.ndarray, flat: bool) -> Batch:
    lengths = tokens.lengths[rows]
    made = collate(tokens.gather(rows), int(lengths.sum() if flat else lengths.max()), 0, flat=flat)
    return with_parts(made, tokens, rows)


def learnt(
    model: Path, tokens: TokenRows, groups: list[Any], method: str, chunk: int | None, flat: bool
) -> tuple[float, list[torch.Tensor]]:
    """The loss of a step with these micro-batches, and its gradients."""
    train = spec_of(method=method, loss_chunk=chunk)
    loaded = load_model(model, train, CPU, seed=1)
    every = np.concatenate(groups)
    goal = StepGoal.of(train, tokens, every, int(tokens.supervised[every].sum()))
    total = 0.0
    for group in groups:
        loss = summed_loss(loaded, batch_of(tokens, np.asarray(group), flat), goal.begin(chunk))
        loss.backward()
        total += loss.item()
    return total, [one.grad for one in loaded.parameters() if one.grad is not None]


@pytest.mark.parametrize(("method", "chunk", "flat"), CASES)
def test_rows_with_integer_weights_are_learnt_as_repeated_ones_in_any_micro_batches(
    small_llama: Path, tokens, method, chunk, flat
):
    """A weight that scales a micro-batch's mean, or a divisor of tokens instead of weights."""
    case: Any = (method, chunk, flat)
    loss, gradients = learnt(small_llama, tokens, [REPEATED[::2], REPEATED[1::2]], *case)
    plain, _ = learnt(small_llama, tokens, [np.arange(8)], *case)
    assert abs(plain - loss) > 1e-3
    for groups in ([np.arange(8)], [[3, 1], [0, 7, 6, 2], [5], [4]]):
        for scale in (1, 0.25):  # Only the ratio of weights counts.
            found, own = learnt(small_llama, weighted(tokens, scale * np.array(WEIGHTS)), groups, *case)
            assert found == pytest.approx(loss, rel=1e-6)
            assert len(own) == len(gradients) > 0
            for ours, theirs in zip(own, gradients, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-7)


def test_equal_weights_are_no_weights(small_llama: Path, tokens):
    expected, gradients = learnt(small_llama, tokens, [np.arange(8)], "full", 16, False)
    found, own = learnt(small_llama, weighted(tokens, [7.0] * 8), [np.arange(8)], "full", 16, False)
    assert found == pytest.approx(expected, rel=1e-6)
    for ours, theirs in zip(own, gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("flat", [False, True])
def test_a_part_of_the_tokens_has_their_weights(tokens, flat):
    """Context parallelism: weights of other tokens, which train the wrong ones without an error."""
    rows = np.array([6, 1, 4])
    batch = batch_of(weighted(tokens), rows, flat)
    length = batch.input_ids_BT.shape[1]
    made = collate(tokens.gather(rows), length + -length % 4, 0, flat=flat)
    batch, found = with_parts(made, tokens, rows), torch.zeros(made.input_ids_BT.shape)
    for index in range(4):
        part = part_of(batch, TokenPart(index=index, parts=4))
        weights_N = weights_of(part.parts)
        assert weights_N is not None
        t = part.input_ids_BT.shape[1]
        place_B, place_T = np.divmod(part.supervised_index_N.numpy(), t)
        found[place_B, index * t + place_T] = weights_N
    expected = torch.from_numpy(np.repeat([1.0, 3.0, 4.0], tokens.supervised[rows])).float()
    assert torch.equal(found.view(-1)[batch.supervised_index_N], expected)


def test_an_interrupted_run_of_weighted_rows_equals_an_uninterrupted_one(small_llama: Path, tmp_path: Path):
    """Weights of other rows after a resume."""
    job = with_weights(small_job(small_llama, tmp_path / "tokens", method="lora", lr=1e-3))
    whole = finish(job)
    without = finish(small_job(small_llama, tmp_path / "without", method="lora", lr=1e-3))
    assert all(mine["loss"] != other["loss"] for mine, other in zip(whole.curves, without.curves, strict=True))
    interrupt(job, tmp_path / "checkpoints", stop_within=2)
    whole.check_equal(in_parts(job, tmp_path / "checkpoints", [3]))
