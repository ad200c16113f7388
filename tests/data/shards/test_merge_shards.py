"""Shards joined: index, duplicates, totals."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from lean_finetune.data.shards.shard_files import merge
from lean_finetune.data.shards.tokenize_run import write_histogram
from tests.data.common import read_tokens
from tests.data.shards.test_shard_files import BLOCKS, make
from tests.data.standin import text_blocks, tokenize_bytes

SIDES = ("train", "heldout")


def merged(root, blocks=None, drop_duplicates=False, sources=1, tokenize=tokenize_bytes):
    _, shards = make(root / "work", blocks, tokenize=tokenize)
    (root / "out").mkdir(parents=True)
    return merge(root / "work", shards, root / "out", sources, 64, drop_duplicates), root / "out"


def test_the_index_describes_each_row_of_the_shards(tmp_path):
    totals, out = merged(tmp_path, text_blocks(BLOCKS, source_of=lambda number: number // 100), sources=2)
    for side in SIDES:
        rows, index = read_tokens(out / side), read_tokens(out / f"{side}-index.arrow")
        for row, one in zip(rows, index, strict=True):
            length = len(row["input_ids"])
            expected = {"length": length, "supervised": length - 1, "source": row["source_file"], "dropped": False}
            assert one == expected
        for source, found in enumerate(totals.sides[side]):
            mine = [one for one in index if one["source"] == source]
            lengths = sorted(one["length"] for one in mine)
            assert (found.rows, found.tokens, found.longest) == (len(mine), sum(lengths), lengths[-1])
            assert found.supervised == sum(one["supervised"] for one in mine)
            assert found.quantile(0.5) == lengths[-(-len(lengths) // 2) - 1]


def test_of_equal_rows_the_first_of_all_shards_remains(tmp_path):
    again = [
        replace(block, payload=b"same\nother") if block.number in (3, 80, 130) else block
        for block in text_blocks(BLOCKS)
    ]
    totals, out = merged(tmp_path, again, drop_duplicates=True)
    found: Counter[bytes] = Counter()
    for side in SIDES:
        for row, index in zip(read_tokens(out / side), read_tokens(out / f"{side}-index.arrow"), strict=True):
            text = bytes(row["input_ids"])
            assert index["dropped"] == (found[text] > 0)
            found[text] += 1
    assert (found[b"same"], found[b"other"]) == (3, 3)
    assert sum(totals.side(side).duplicates for side in SIDES) == 4
    assert sum(totals.side(side).rows for side in SIDES) == len(found)


@pytest.mark.parametrize("heldout_block", [0, 1])
def test_a_training_row_that_equals_a_held_out_one_is_dropped(tmp_path, heldout_block):
    """It would train the model on what it is evaluated on, whichever comes first."""
    blocks = [replace(block, payload=b"same") for block in text_blocks(2)]
    _, out = merged(
        tmp_path,
        blocks,
        drop_duplicates=True,
        tokenize=lambda block: tokenize_bytes(block, is_heldout=lambda _: block.number == heldout_block),
    )
    assert [one["dropped"] for one in read_tokens(out / "train-index.arrow")] == [True]
    assert [one["dropped"] for one in read_tokens(out / "heldout-index.arrow")] == [False]


def test_the_histogram_counts_every_row_in_its_bin(tmp_path):
    totals, out = merged(tmp_path)
    write_histogram(tmp_path / "lengths.csv", totals.side("train"))
    lines = [tuple(map(int, line.split(","))) for line in (tmp_path / "lengths.csv").read_text().splitlines()[1:]]
    edges, rows = zip(*lines, strict=True)
    lengths = [len(row["input_ids"]) for row in read_tokens(out / "train")]
    assert list(rows) == np.histogram(lengths, [1, *np.array(edges) + 1])[0].tolist()
    assert len(lines) <= 50 and edges[-1] >= max(lengths)
