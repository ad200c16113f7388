"""Token rows are views of the shards; damaged files are refused in one line and never read past their end."""

from itertools import product

import numpy as np
import pyarrow as pa
import pytest

from lean_finetune.core.arrow_files import StoredBatch
from lean_finetune.core.errors import UserError
from lean_finetune.step.token_rows import TokenRows
from tests.token_files import Row, write_index, write_tokens

EOS = 3
ROWS: list[Row] = [
    ([5, 6, 7, 8, EOS], [2, 5], "sums"),
    ([9, 10, EOS], [0, 3], None),
    ([11, 12, 13, EOS, 14, 15, 16, EOS], [2, 4, 6, 8], "dates"),
    ([17, EOS], [1, 2], "sums"),
    ([18, 19, 20], [1, 3], None),
]


@pytest.mark.parametrize(("token_type", "span_type"), [(pa.uint16(), pa.uint16()), (pa.int32(), pa.int32())])
@pytest.mark.parametrize(("block", "blocks_per_shard"), [(1, 1), (2, 1), (2, 2), (9, 9)])
def test_rows_read_back_as_written_across_record_batches_and_shards(
    tmp_path, token_type, span_type, block, blocks_per_shard
):
    written = write_tokens(
        tmp_path, ROWS, token_type=token_type, span_type=span_type, block=block, blocks_per_shard=blocks_per_shard
    )
    tokens = TokenRows(written, "train")
    assert len(tokens) == len(ROWS)
    for row, (ids, spans, family) in enumerate(ROWS):
        assert tokens.ids(row).tolist() == ids
        assert tokens.spans(row).ravel().tolist() == spans
        assert tokens.family(row) == family
    assert tokens.lengths.tolist() == [len(ids) for ids, _, _ in ROWS]
    assert tokens.supervised.tolist() == [3, 2, 4, 1, 2]


def test_a_shard_without_rows_is_skipped(tmp_path):
    """All rows of a shard's blocks may be held out."""
    write_tokens(tmp_path, ROWS, blocks_per_shard=1)
    for number in (2, 1):
        (tmp_path / f"train/{number:05}.arrow").rename(tmp_path / f"train/{number + 1:05}.arrow")
    empty = write_tokens(tmp_path / "other", [])
    (empty / "train/00000.arrow").rename(tmp_path / "train/00001.arrow")
    tokens = TokenRows(tmp_path, "train")
    assert [tokens.ids(row).tolist() for row in range(len(tokens))] == [ids for ids, _, _ in ROWS]


def test_rows_are_views_of_the_files_so_memory_does_not_grow_with_the_data(tmp_path):
    tokens = TokenRows(write_tokens(tmp_path, ROWS), "train")
    mapped_before = pa.total_allocated_bytes()
    for row in range(len(tokens)):
        for view in (tokens.ids(row), tokens.spans(row)):
            assert not view.flags.owndata and not view.flags.writeable
    assert pa.total_allocated_bytes() == mapped_before


@pytest.mark.parametrize("row", [-1, len(ROWS)])
def test_a_row_that_does_not_exist_is_refused_and_never_wraps_around(tmp_path, row):
    tokens = TokenRows(write_tokens(tmp_path, ROWS), "train")
    with pytest.raises(IndexError, match="no row"):
        tokens.ids(row)


def test_dropped_duplicates_are_not_among_the_rows_in_use(tmp_path):
    assert TokenRows(write_tokens(tmp_path, ROWS, dropped=[1, 4]), "train").used.tolist() == [0, 2, 3]


FAULTS = [[2, 9], [3, 2], [2], [2, 4, 3, 5], []]


@pytest.mark.parametrize(
    ("span_type", "spans"), [*product((pa.int32(), pa.uint16()), FAULTS), (pa.int32(), [-1, 2])], ids=str
)
def test_spans_that_do_not_fit_their_row_are_refused_instead_of_clipped(tmp_path, span_type, spans):
    """Found whatever the other rows are: spans of all rows of a block are checked together."""
    original = ([5, 6, 7, 8, 9], [2, 5], None)
    rows = [original, ([5, 6, 7, 8, 9], spans, None), original]
    tokens = TokenRows(write_tokens(tmp_path, rows, span_type=span_type, block=3), "train")
    with pytest.raises(UserError, match=r"train: rows? .*loss spans"):
        tokens.spans(0)


def test_the_row_with_the_wrong_spans_is_named(tmp_path):
    rows = [([5, 6, 7], [1, 3], None), ([5, 6, 7], [2, 3, 1, 2], None), ([5, 6, 7], [0, 1], None)]
    tokens = TokenRows(write_tokens(tmp_path, rows, block=9), "train")
    with pytest.raises(UserError, match=r"row 1: loss spans \[2, 3, 1, 2\]"):
        tokens.ids(2)


@pytest.mark.parametrize("keep", [0.0, 0.5, 0.99])
@pytest.mark.parametrize("name", ["train/00001.arrow", "train-index.arrow"])
def test_a_truncated_file_is_refused(tmp_path, name, keep):
    path = write_tokens(tmp_path, ROWS) / name
    original = path.read_bytes()
    path.write_bytes(original[: int(len(original) * keep)])
    with pytest.raises(UserError, match="not a complete Arrow file"):
        TokenRows(tmp_path, "train")


@pytest.mark.parametrize("offsets", [[0, 3, 5_000_000], [0, 4, 5], [-4, 3, 5], [0, 5, 3]])
def test_offsets_that_do_not_fit_the_tokens_are_refused(tmp_path, monkeypatch, offsets):
    """Unchecked they would read foreign memory through the mapping, also if somebody forged the checksums."""
    path = write_tokens(tmp_path, [([5, 6, 7], [1, 3], None), ([8, 9], [1, 2], None)]) / "train/00000.arrow"
    original = path.read_bytes()
    stored = np.array([0, 3, 5], np.int32).tobytes()
    assert original.count(stored) == 1
    path.write_bytes(original.replace(stored, np.array(offsets, np.int32).tobytes()))
    with pytest.raises(UserError, match="column input_ids of batch 0 differs from its checksum"):
        TokenRows(tmp_path, "train").ids(0)
    monkeypatch.setattr(StoredBatch, "_compare", lambda *_: None)
    with pytest.raises(UserError, match="rows 0 to 1: their lengths differ from the index"):
        TokenRows(tmp_path, "train").ids(0)


def test_shards_and_index_of_different_runs_are_refused(tmp_path):
    """Lengths of one run with tokens of another would silently train truncated rows."""
    write_tokens(tmp_path, ROWS)
    write_index(tmp_path / "train-index.arrow", ROWS[:-1])
    with pytest.raises(UserError, match="shards have 5 rows and its index 4"):
        TokenRows(tmp_path, "train")
    write_index(tmp_path / "train-index.arrow", ROWS[::-1])
    with pytest.raises(UserError, match="differ from the index"):
        TokenRows(tmp_path, "train").ids(0)


def test_missing_empty_and_foreign_files_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"train-index\.arrow: file is missing"):
        TokenRows(tmp_path, "train")
    with pytest.raises(UserError, match="has no row"):
        TokenRows(write_tokens(tmp_path / "empty", []), "train")
    with pytest.raises(UserError, match="has no row"):
        TokenRows(write_tokens(tmp_path / "dropped", ROWS, dropped=range(5)), "train")
    with pytest.raises(UserError, match=r"column input_ids must be list<item: uint16> or list<item: int32>"):
        TokenRows(write_tokens(tmp_path / "int64", ROWS, token_type=pa.int64()), "train")
