"""Shards joined: index, duplicates, totals; and the parts of several machines."""

import shutil
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from lean_finetune.core.errors import UserError
from lean_finetune.data.shards.merge_shards import LocatedShard, merge
from lean_finetune.data.shards.parts import TokenizePart, collect, parse_part, write_manifest
from lean_finetune.data.shards.statistics import write_histogram
from tests.data.tokens import standin
from tests.data.tokens.standin import read_records, text_blocks
from tests.data.tokens.test_shard_files import BLOCKS, files, make

INPUTS = {"data": "d", "code": "c"}


def merged(root, blocks=None, drop_duplicates=False, sources=1):
    _, shards, _ = make(root / "work", blocks)
    (root / "out").mkdir(parents=True)
    totals = merge(
        [LocatedShard(root=root / "work", shard=shard) for shard in shards], root / "out", sources, drop_duplicates
    )
    return totals, root / "out"


def rows_of(out, side):
    return [row for path in sorted((out / side).iterdir()) for row in read_records(path)]


def test_the_index_describes_each_row_of_the_shards(tmp_path):
    totals, out = merged(tmp_path, text_blocks(BLOCKS, source_of=lambda number: number // 100), sources=2)
    for side in ("train", "heldout"):
        rows, index = rows_of(out, side), read_records(out / f"{side}-index.arrow")
        assert [one["length"] for one in index] == [len(row["input_ids"]) for row in rows]
        assert [one["supervised"] for one in index] == [len(row["input_ids"]) - 1 for row in rows]
        assert [one["source"] for one in index] == [row["source_file"] for row in rows]
        assert not any(one["dropped"] for one in index)
        for source in range(2):
            mine = [one for one in index if one["source"] == source]
            figures = totals.sides[side][source]
            assert (figures.rows, figures.tokens) == (len(mine), sum(one["length"] for one in mine))
            assert figures.supervised == sum(one["supervised"] for one in mine)
            lengths = sorted(one["length"] for one in mine)
            assert figures.longest == lengths[-1]
            assert figures.quantile(0.5) == lengths[-(-len(lengths) // 2) - 1]


def test_of_equal_rows_the_first_stays_over_all_shards(tmp_path):
    again = [
        replace(block, payload=b"same\nother") if block.number in (3, 80, 130) else block
        for block in text_blocks(BLOCKS)
    ]
    totals, out = merged(tmp_path, again, drop_duplicates=True)
    found: Counter[bytes] = Counter()
    for side in ("train", "heldout"):
        for row, index in zip(rows_of(out, side), read_records(out / f"{side}-index.arrow"), strict=True):
            text = bytes(row["input_ids"])
            assert index["dropped"] == (found[text] > 0)
            found[text] += 1
    assert (found[b"same"], found[b"other"]) == (3, 3)
    assert totals.side("train").duplicates + totals.side("heldout").duplicates == 4
    assert totals.side("train").rows + totals.side("heldout").rows == len(found)


def swapped(tokens):
    """The same rows on the other side."""
    return replace(
        tokens,
        train=tokens.heldout,
        heldout=tokens.train,
        train_supervised=tokens.heldout_supervised,
        heldout_supervised=tokens.train_supervised,
        train_digests=tokens.heldout_digests,
        heldout_digests=tokens.train_digests,
    )


@pytest.mark.parametrize("held_out", [0, 1])
def test_a_training_row_that_equals_a_held_out_one_is_dropped(tmp_path, monkeypatch, held_out):
    """It would show the model what it is tested on, whichever comes first."""
    real = standin.tokenize_bytes
    is_swapped = real(next(iter(same_row(1)))).heldout.num_rows == (0 if held_out == 0 else 1)
    monkeypatch.setattr(
        standin,
        "tokenize_bytes",
        lambda block: swapped(real(block)) if (block.number == 0) == is_swapped else real(block),
    )
    _, out = merged(tmp_path, same_row(2), drop_duplicates=True)
    assert [one["dropped"] for one in read_records(out / "train-index.arrow")] == [True]
    assert [one["dropped"] for one in read_records(out / "heldout-index.arrow")] == [False]


def same_row(count):
    return [replace(block, payload=b"same") for block in text_blocks(count)]


def test_the_histogram_counts_every_row_in_its_bin(tmp_path):
    totals, out = merged(tmp_path)
    write_histogram(tmp_path / "lengths.csv", totals.side("train"))
    lines = [tuple(map(int, line.split(","))) for line in (tmp_path / "lengths.csv").read_text().splitlines()[1:]]
    lengths = np.array([len(row["input_ids"]) for row in rows_of(out, "train")])
    lower = [0, *(edge for edge, _ in lines)]
    assert [rows for _, rows in lines] == [
        int(((lengths > low) & (lengths <= edge)).sum()) for low, (edge, _) in zip(lower, lines, strict=False)
    ]
    assert len(lines) <= 50 and lines[-1][0] >= lengths.max()


@pytest.mark.parametrize("text", ["4/4", "1", "-1/2", "a/b", "1/2/3", "0/0"])
def test_an_invalid_part_is_refused(text):
    with pytest.raises(UserError, match="--part: must be i/n"):
        parse_part(text)


def make_parts(root, of):
    for number in range(of):
        part = TokenizePart(number=number, of=of)
        directory = part.directory(root)
        _, shards, all_shards = make(directory, part=number, parts=of)
        write_manifest(directory, part, INPUTS, "k", shards, all_shards)


def test_parts_in_any_directories_are_the_shards_of_one_run(tmp_path):
    make_parts(tmp_path / "a", 2)
    (tmp_path / "b").mkdir()
    shutil.move(tmp_path / "a/part-1-of-2", tmp_path / "b/part-1-of-2")
    placed = collect([tmp_path / "b", tmp_path / "a"], INPUTS, "k")
    (tmp_path / "out").mkdir()
    merge(placed, tmp_path / "out", 1, False)
    _, whole = merged(tmp_path / "one")
    assert files(tmp_path / "out") == files(whole)


def test_more_parts_than_shards_leave_some_empty(tmp_path):
    make_parts(tmp_path, 5)
    assert [one.shard.number for one in collect([tmp_path], INPUTS, "k")] == [0, 1, 2]


def remove_all(root):
    for path in root.iterdir():
        shutil.rmtree(path)


def damage(root):
    path = root / "part-0-of-2/train/00002.arrow"
    path.write_bytes(path.read_bytes()[:-1])


def edit_manifest(root):
    path = root / "part-0-of-2/manifest.json"
    path.write_text(path.read_text().replace('"all_shards": 3', '"all_shards": 2'))


FAULTS = {
    "missing part": (
        lambda root: shutil.rmtree(root / "part-1-of-2"),
        "k",
        "--merge: 1 of 3 shards are missing (first 1)",
    ),
    "nothing": (remove_all, "k", "has no finished part"),
    "unfinished": (lambda root: (root / "part-1-of-2/manifest.json").unlink(), "k", "1 of 3 shards are missing"),
    "damaged": (damage, "k", "part-0-of-2: a file is missing or damaged; run this part again"),
    "edited manifest": (edit_manifest, "k", "manifest.json: is damaged; run this part again"),
    "other key": (lambda root: None, "other", "manifest.json: made with other data than here"),
    "twice": (lambda root: make_parts(root, 3), "k", "is also in"),
}


@pytest.mark.parametrize("fault, key, rule", FAULTS.values(), ids=FAULTS)
def test_incomplete_or_damaged_parts_are_refused(tmp_path, fault, key, rule):
    make_parts(tmp_path, 2)
    fault(tmp_path)
    with pytest.raises(UserError) as told:
        collect([tmp_path], INPUTS | {"data": "d" if key == "k" else "e"}, key)
    assert rule in str(told.value)
