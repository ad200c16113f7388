"""Tensors of a micro-batch: targets come from spans alone, padding is never trained and never seen."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from stages.bucket.plan import MicroBatch
from stages.errors import UserError
from stages.step.batches import IGNORED, BatchShape, TokenRows, collate, empty_batch, read_batch

EOS = 3

Row = tuple[list[int], list[int], str | None]
"""Token ids, flat spans, family."""

ROWS: list[Row] = [
    ([5, 6, 7, 8, EOS], [2, 5], "sums"),
    ([9, 10, EOS], [0, 3], None),
    ([11, 12, 13, EOS, 14, 15, 16, EOS], [2, 4, 6, 8], "dates"),
    ([17, EOS], [1, 2], "sums"),
    ([18, 19, 20], [1, 3], None),
]


def write_tokens(path: Path, rows: list[Row] = ROWS, token_type: pa.DataType | None = None, block: int = 2) -> Path:
    """Write rows as tokenize does: Arrow IPC, `block` rows per record batch."""
    schema = pa.schema(
        [
            ("input_ids", pa.list_(token_type or pa.uint16())),
            ("loss_spans", pa.list_(pa.int32())),
            ("family", pa.string()),
            ("source_row", pa.int64()),
        ]
    )
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        for start in range(0, len(rows), block):
            ids, spans, families = zip(*rows[start : start + block], strict=True)
            numbers = range(start, start + len(ids))
            columns = [
                pa.array(values, field.type)
                for values, field in zip((ids, spans, families, numbers), schema, strict=True)
            ]
            writer.write_batch(pa.record_batch(columns, schema=schema))
    return path


def micro_batch(rows: list[int], length: int, supervised: int) -> MicroBatch:
    return MicroBatch(epoch=0, step=0, rows=np.array(rows, np.int32), length=length, supervised=supervised)


def arrays(ids: list[int], spans: list[int]) -> tuple[np.ndarray, np.ndarray]:
    return np.array(ids, np.uint16), np.array(spans, np.int32).reshape(-1, 2)


@pytest.mark.parametrize("token_type", [pa.uint16(), pa.int32()])
def test_rows_read_back_as_written_across_record_batches(tmp_path, token_type):
    tokens = TokenRows(write_tokens(tmp_path / "train.arrow", token_type=token_type))
    assert len(tokens) == len(ROWS)
    for row, (ids, spans, family) in enumerate(ROWS):
        assert tokens.ids(row).tolist() == ids
        assert tokens.spans(row).ravel().tolist() == spans
        assert (tokens.family(row), tokens.source_row(row)) == (family, row)
    assert tokens.lengths().tolist() == [len(ids) for ids, _, _ in ROWS]


def test_rows_are_views_of_the_file_so_memory_does_not_grow_with_the_data(tmp_path):
    tokens = TokenRows(write_tokens(tmp_path / "train.arrow"))
    mapped_before = pa.total_allocated_bytes()
    for row in range(len(tokens)):
        for view in (tokens.ids(row), tokens.spans(row)):
            assert not view.flags.owndata and not view.flags.writeable
    assert pa.total_allocated_bytes() == mapped_before


@pytest.mark.parametrize("row", [-1, len(ROWS)])
def test_a_row_that_does_not_exist_is_refused_and_never_wraps_around(tmp_path, row):
    tokens = TokenRows(write_tokens(tmp_path / "train.arrow"))
    with pytest.raises(IndexError, match="no row"):
        tokens.ids(row)


def test_a_trained_eos_stays_trained_when_padding_uses_the_same_id():
    """Models tuned with labels masked wherever the id equals pad never learn to stop (trl #976)."""
    batch = collate([arrays(*ROWS[0][:2]), arrays(*ROWS[3][:2])], length=8, pad_id=EOS)
    assert batch.input_ids_BT.tolist() == [[5, 6, 7, 8, 3, 3, 3, 3], [17, 3, 3, 3, 3, 3, 3, 3]]
    no = IGNORED
    assert batch.targets_BT.tolist() == [[no, 7, 8, EOS, no, no, no, no], [EOS, no, no, no, no, no, no, no]]
    assert batch.supervised_index_N.tolist() == [1, 2, 3, 8]


def test_the_first_token_is_never_a_target_because_nothing_predicts_it():
    batch = collate([arrays(*ROWS[1][:2])], length=3, pad_id=0)
    assert batch.targets_BT.tolist() == [[10, EOS, IGNORED]]


@st.composite
def token_rows(draw):
    """Rows of random ids with random disjoint spans, and a length that holds them."""
    rows = []
    for _ in range(draw(st.integers(1, 5))):
        trained = np.array(draw(st.lists(st.booleans(), min_size=1, max_size=20)))
        ids = draw(st.lists(st.integers(0, 65_535), min_size=len(trained), max_size=len(trained)))
        edges = np.flatnonzero(np.diff(np.concatenate([[0], trained.astype(int), [0]])))
        rows.append((np.array(ids, np.uint16), edges.astype(np.int32).reshape(-1, 2), trained))
    longest = max(len(ids) for ids, _, _ in rows)
    return rows, longest + draw(st.integers(0, 5)), draw(st.integers(0, 65_535))


@settings(max_examples=150, deadline=None)
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


def test_padding_changes_no_row_though_no_mask_is_passed():
    """Right padding under causal attention is invisible to real tokens: per-row losses equal those of rows alone."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, use_cache=False
    )
    model = LlamaForCausalLM(config).eval()
    generator = np.random.default_rng(0)
    rows = []
    for length in (5, 17, 30, 48):
        ids = generator.integers(0, 64, length).astype(np.uint16)
        rows.append((ids, np.array([[length // 2, length]], np.int32)))

    def loss_per_row(rows, length: int) -> torch.Tensor:
        batch = collate(rows, length, pad_id=EOS)
        with torch.no_grad():
            logits_BTV = model(input_ids=batch.input_ids_BT, use_cache=False).logits
        losses_BT = torch.nn.functional.cross_entropy(
            logits_BTV.transpose(1, 2), batch.targets_BT, ignore_index=IGNORED, reduction="none"
        )
        return losses_BT.sum(1)

    together = loss_per_row(rows, length=64)
    alone = torch.cat([loss_per_row([row], length=len(row[0])) for row in rows])
    assert alone.min() > 1
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)


def test_a_planned_micro_batch_is_read_with_the_shape_it_was_planned_with(tmp_path):
    tokens = TokenRows(write_tokens(tmp_path / "train.arrow"))
    planned = micro_batch([2, 0], length=8, supervised=7)
    batch = read_batch(tokens, planned, pad_id=0)
    assert batch.input_ids_BT.tolist() == [ROWS[2][0], [*ROWS[0][0], 0, 0, 0]]
    shape = BatchShape.of(planned)
    assert shape == BatchShape(rows=2, length=8, supervised=7)
    with FakeTensorMode():
        fake = empty_batch(shape, "cpu")
    for real, traced in zip(vars(batch).values(), vars(fake).values(), strict=True):
        assert (real.shape, real.dtype, real.stride()) == (traced.shape, traced.dtype, traced.stride())


def test_a_batch_moves_whole():
    batch = collate([arrays(*ROWS[0][:2])], length=8, pad_id=0).to("meta")
    assert {tensor.device.type for tensor in vars(batch).values()} == {"meta"}


@pytest.mark.parametrize(
    "stale",
    [micro_batch([0, 9], 8, 4), micro_batch([-1], 8, 4), micro_batch([2], 6, 4), micro_batch([0], 8, 2)],
    ids=["row beyond the file", "negative row", "row longer than planned", "other supervised tokens"],
)
def test_a_plan_made_for_other_tokens_is_refused(tmp_path, stale):
    """A divisor of the loss taken from a stale plan would scale every gradient wrongly."""
    tokens = TokenRows(write_tokens(tmp_path / "train.arrow"))
    with pytest.raises(UserError, match="run `dvc repro bucket`"):
        read_batch(tokens, stale, pad_id=0)


@pytest.mark.parametrize("spans", [[2, 9], [3, 2], [-1, 2], [2], [2, 4, 3, 5]])
def test_spans_that_do_not_fit_their_row_are_refused_instead_of_clipped(tmp_path, spans):
    tokens = TokenRows(write_tokens(tmp_path / "train.arrow", [([5, 6, 7, 8, 9], spans, None)]))
    with pytest.raises(UserError, match="row 0: loss spans"):
        tokens.spans(0)


@pytest.mark.parametrize("keep", [0.0, 0.1, 0.5, 0.99])
def test_a_file_cut_short_is_told_in_one_line(tmp_path, keep):
    path = write_tokens(tmp_path / "train.arrow")
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * keep)])
    with pytest.raises(UserError, match="not a whole Arrow file") as caught:
        TokenRows(path)
    assert "\n" not in str(caught.value)


def test_offsets_that_point_outside_the_tokens_are_refused(tmp_path):
    """Unchecked they would read foreign memory through the mapping."""
    path = write_tokens(tmp_path / "train.arrow", [([5, 6, 7], [1, 3], None), ([8, 9], [1, 2], None)])
    whole = path.read_bytes()
    offsets = np.array([0, 3, 5], np.int32).tobytes()
    assert whole.count(offsets) == 1
    path.write_bytes(whole.replace(offsets, np.array([0, 3, 5_000_000], np.int32).tobytes()))
    with pytest.raises(UserError, match="column input_ids is broken"):
        TokenRows(path)


def test_missing_empty_and_foreign_files_are_told_in_one_line(tmp_path):
    with pytest.raises(UserError, match="file is missing"):
        TokenRows(tmp_path / "none.arrow")
    with pytest.raises(UserError, match="holds no row"):
        TokenRows(write_tokens(tmp_path / "empty.arrow", []))
    with pytest.raises(UserError, match=r"column input_ids must be list<item: uint16> or list<item: int32>"):
        TokenRows(write_tokens(tmp_path / "int64.arrow", token_type=pa.int64()))
