"""Held-out loss: the right number, whatever the batches, without all logits at once."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from lean_finetune.evaluate.generate import batch_rows, row_sums, spread_rows
from lean_finetune.step.evaluation_limits import EvaluationLimits
from tests.evaluate.conftest import CPU, PAD, spec_of
from tests.kit.loaded import load_base

VOCABULARY = 1536


def losses_of(model, rows, max_tokens=128, logits_chunk=16, numbers=None):
    numbers = list(range(len(rows))) if numbers is None else numbers
    limits = EvaluationLimits(max_tokens=max_tokens, logits_chunk=logits_chunk, max_new_tokens=1, generate_batch_rows=1)
    return row_sums(model, spec_of("full"), rows.gather, rows.lengths, numbers, limits, pad_id=PAD, device=CPU)


@pytest.fixture(scope="module")
def model(base_dir):
    return load_base(base_dir, spec_of("full"), CPU, "sdpa").eval()


def test_row_losses_equal_the_models_own_loss_row_by_row(model, rows):
    """A shifted target, a lost span or padding in the loss would make this differ."""
    expected = []
    for number in range(len(rows)):
        ids = torch.tensor(rows.ids(number).astype(np.int64))[None]
        labels = torch.full_like(ids, -100)
        for start, end in rows.spans(number).tolist():
            labels[0, start:end] = ids[0, start:end]
        with torch.no_grad():
            logits = model(input_ids=ids).logits.double()
        expected.append(F.cross_entropy(logits[0, :-1], labels[0, 1:], reduction="sum").item())
    np.testing.assert_allclose(losses_of(model, rows), expected, rtol=1e-5)


def test_loss_depends_neither_on_batches_nor_on_chunks_nor_on_the_order_of_rows(model, rows):
    """Padding that counts in the loss; losses in the order of the batches, which are sorted by length."""
    reference = losses_of(model, rows, max_tokens=64, logits_chunk=1536)
    np.testing.assert_allclose(losses_of(model, rows, max_tokens=4096, logits_chunk=3), reference, rtol=1e-5)
    np.testing.assert_allclose(losses_of(model, rows, numbers=[9, 2, 5]), reference[[9, 2, 5]], rtol=1e-5)


class LargestLogits(TorchDispatchMode):
    """The most elements of any tensor whose last dimension is the vocabulary."""

    def __init__(self):
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.t.default:  # the head's own weights
            return out
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor) and tensor.ndim and tensor.shape[-1] == VOCABULARY:
                self.rows = max(self.rows, tensor.numel() // VOCABULARY)
        return out


def test_logits_of_at_most_one_chunk_exist(model, rows):
    """Evaluation that stores all logits is a known cause of running out of memory after a long training."""
    with LargestLogits() as largest:
        losses_of(model, rows, max_tokens=4096, logits_chunk=5)
    assert largest.rows == 5


@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=40).map(lambda values: np.array(values, np.int32)),
    max_tokens=st.integers(1, 500),
)
def test_batches_have_every_row_once_within_the_budget_longest_first(lengths, max_tokens):
    batches = list(batch_rows(lengths, range(len(lengths)), max_tokens))
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[batch]) <= max_tokens
    assert [lengths[batch[0]] for batch in batches] == sorted((lengths[batch[0]] for batch in batches), reverse=True)


@pytest.mark.parametrize(
    ("total", "count", "expected"),
    [(5, None, [0, 1, 2, 3, 4]), (5, 9, [0, 1, 2, 3, 4]), (10, 4, [0, 2, 5, 7]), (7, 1, [0])],
)
def test_rows_for_the_loss_are_spread_over_the_file(total, count, expected):
    """The first rows of a sorted file would be one task only."""
    assert spread_rows(np.arange(total), count) == expected
