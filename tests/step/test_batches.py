"""Tensors of a micro-batch: targets come from spans alone, padding is never trained and never seen."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from lean_finetune.core.errors import UserError
from lean_finetune.step.batches import (
    IGNORED,
    Batch,
    BatchShape,
    TokenPart,
    collate,
    empty_batch,
    packed_lengths,
    part_of,
    read_batch,
)
from lean_finetune.step.token_rows import TokenRows
from tests.memory.common import micro_batch
from tests.step.test_token_rows import EOS, ROWS
from tests.token_files import write_tokens


def arrays(ids: list[int], spans: list[int]) -> tuple[np.ndarray, np.ndarray]:
    return np.array(ids, np.uint16), np.array(spans, np.int32).reshape(-1, 2)


def test_a_trained_eos_stays_trained_when_padding_uses_the_same_id():
    """Models tuned with labels masked wherever the id equals pad never learn to stop (trl #976)."""
    batch = collate([arrays(*ROWS[0][:2]), arrays(*ROWS[3][:2])], length=8, pad_id=EOS)
    assert batch.input_ids_BT.tolist() == [[5, 6, 7, 8, 3, 3, 3, 3], [17, 3, 3, 3, 3, 3, 3, 3]]
    no = IGNORED
    assert batch.targets_BT.tolist() == [[no, 7, 8, EOS, no, no, no, no], [EOS, no, no, no, no, no, no, no]]
    assert batch.supervised_index_N.tolist() == [1, 2, 3, 8]


@st.composite
def token_rows(draw):
    """Rows of random ids with random disjoint spans, and a length into which they fit."""
    rows = []
    for _ in range(draw(st.integers(1, 5))):
        trained = np.array(draw(st.lists(st.booleans(), min_size=1, max_size=20)))
        ids = draw(st.lists(st.integers(0, 65_535), min_size=len(trained), max_size=len(trained)))
        edges = np.flatnonzero(np.diff(np.concatenate([[0], trained.astype(int), [0]])))
        rows.append((np.array(ids, np.uint16), edges.astype(np.int32).reshape(-1, 2), trained))
    longest = max(len(ids) for ids, _, _ in rows)
    return rows, longest + draw(st.integers(0, 5)), draw(st.integers(0, 65_535))


@settings(max_examples=50, deadline=None)
@given(token_rows())
def test_every_trained_token_is_predicted_once_from_the_position_before_it(drawn):
    rows, length, pad_id = drawn
    batch = collate([(ids, spans) for ids, spans, _ in rows], length, pad_id)
    expected = torch.full((len(rows), length), IGNORED)
    for b, (ids, _, trained) in enumerate(rows):
        assert batch.input_ids_BT[b].tolist() == ids.tolist() + [pad_id] * (length - len(ids))
        for position in range(1, len(ids)):
            if trained[position]:
                expected[b, position - 1] = int(ids[position])
    assert torch.equal(batch.targets_BT, expected)
    assert torch.equal(batch.supervised_index_N, (expected.flatten() != IGNORED).nonzero().flatten())


@pytest.mark.parametrize("flat", [False, True])
def test_the_parts_of_a_batch_have_each_of_its_tokens_once(flat):
    """A target, or a position, of another process's part."""
    batch = collate([arrays(*ROWS[0][:2]), arrays(*ROWS[3][:2])], length=12, pad_id=EOS, flat=flat)
    parts = [part_of(batch, TokenPart(index=index, parts=3)) for index in range(3)]
    for name in ("input_ids_BT", "targets_BT"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts], dim=1), getattr(batch, name))
    expected = torch.arange(12)[None] if batch.packed_rows is None else batch.packed_rows.positions_BT
    assert torch.equal(torch.cat([part.positions_BT for part in parts if part.positions_BT is not None], 1), expected)
    for part in parts:
        assert torch.equal(part.supervised_index_N, (part.targets_BT.flatten() != IGNORED).nonzero().flatten())


@settings(max_examples=50, deadline=None)
@given(token_rows(), st.integers(0, 90))
def test_joined_rows_train_the_same_tokens_and_count_positions_from_their_own_start(drawn, padding):
    """The last token of a row must never predict the first of the next."""
    rows, _, pad_id = drawn
    total = sum(len(ids) for ids, _, _ in rows) + padding
    batch = collate([(ids, spans) for ids, spans, _ in rows], total, pad_id, flat=True)
    alone = [collate([(ids, spans)], len(ids), pad_id) for ids, spans, _ in rows]
    ids = torch.cat([one.input_ids_BT for one in alone] + [torch.full((1, padding), pad_id)], dim=1)
    targets = torch.cat([one.targets_BT for one in alone] + [torch.full((1, padding), IGNORED)], dim=1)
    assert torch.equal(batch.input_ids_BT, ids) and torch.equal(batch.targets_BT, targets)
    assert torch.equal(batch.supervised_index_N, (targets.flatten() != IGNORED).nonzero().flatten())
    joined = batch.packed_rows
    assert joined is not None and joined.offsets.dtype == torch.int32
    places = [place for ids, _, _ in rows for place in range(len(ids))]
    assert joined.positions_BT[0].tolist() == places + [0] * padding
    assert torch.diff(joined.offsets).tolist() == list(joined.lengths)


@pytest.mark.parametrize(
    ("lengths", "total", "expected"),
    [([5, 3], 8, (5, 3)), ([5, 3], 9, (5, 3, 1)), ([4], 2052, (4, 1024, 1024)), ([4], 1030, (4, 1024, 2))],
)
def test_padding_of_joined_rows_is_split_into_short_rows(lengths, total, expected):
    """Attention over one long row of padding would grow with its square."""
    assert packed_lengths(lengths, total) == expected


def tensors_of(batch: Batch) -> list[torch.Tensor]:
    """All tensors of a batch."""
    joined = batch.packed_rows
    tensors = [batch.input_ids_BT, batch.targets_BT, batch.supervised_index_N]
    return tensors if joined is None else [*tensors, joined.offsets, joined.positions_BT]


@pytest.mark.parametrize(
    ("planned", "ids", "shape"),
    [
        (
            micro_batch(0, [2, 0], 8, 7),
            [ROWS[2][0], [*ROWS[0][0], 0, 0, 0]],
            BatchShape(rows=2, length=8, supervised=7, packed_lengths=None),
        ),
        (
            micro_batch(0, [2, 0], 16, 7, flat=True),
            [[*ROWS[2][0], *ROWS[0][0], 0, 0, 0]],
            BatchShape(rows=1, length=16, supervised=7, packed_lengths=(8, 5, 3)),
        ),
    ],
    ids=["padded", "joined"],
)
def test_a_micro_batch_is_read_in_its_planned_shape(tmp_path, planned, ids, shape):
    tokens = TokenRows(write_tokens(tmp_path, ROWS), "train")
    batch = read_batch(tokens, planned, pad_id=0)
    assert batch.input_ids_BT.tolist() == ids
    assert BatchShape.of(planned, tokens.lengths) == shape
    with FakeTensorMode():
        fake = empty_batch(shape, "cpu")
    assert (batch.packed_rows is None) == (fake.packed_rows is None)
    for real, traced in zip(tensors_of(batch), tensors_of(fake), strict=True):
        assert (real.shape, real.dtype, real.stride()) == (traced.shape, traced.dtype, traced.stride())


@pytest.mark.parametrize("flat", [False, True])
def test_all_tensors_of_a_batch_move_to_a_device(flat):
    batch = collate([arrays(*ROWS[0][:2])], length=8, pad_id=0, flat=flat).to("meta")
    assert {tensor.device.type for tensor in tensors_of(batch)} == {"meta"}


@pytest.mark.parametrize(
    "stale",
    [
        micro_batch(0, [0, 9], 8, 4),
        micro_batch(0, [-1], 8, 4),
        micro_batch(0, [2], 6, 4),
        micro_batch(0, [0], 8, 2),
        micro_batch(0, [0, 2], 12, 7, flat=True),
        micro_batch(0, [4], 8, 2),
    ],
    ids=["row beyond the file", "negative row", "longer than planned", "supervised", "joined longer", "dropped"],
)
def test_a_plan_made_for_other_tokens_is_refused(tmp_path, stale):
    """A divisor of the loss taken from a stale plan would scale every gradient wrongly."""
    tokens = TokenRows(write_tokens(tmp_path, ROWS, dropped=[4]), "train")
    with pytest.raises(UserError, match="run `dvc repro bucket`"):
        read_batch(tokens, stale, pad_id=0)
