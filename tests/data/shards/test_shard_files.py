"""Shards: resumed, damaged, or made from other bytes; and their directory, locked by one process."""

import multiprocessing
from dataclasses import replace

import datasets
import pyarrow as pa
import pytest

from lean_finetune.core.errors import UserError
from lean_finetune.data.shards.shard_files import BLOCKS_PER_SHARD, finished_shard
from lean_finetune.data.shards.tokenize_run import make_shards, work_directory
from tests.conftest import ROOT
from tests.data.common import read_tokens
from tests.data.standin import text_blocks, tokenize_bytes

BLOCKS = 2 * BLOCKS_PER_SHARD + 5


def make(root, blocks=None, key="k", tokenize=tokenize_bytes):
    """Make shards; return the number of tokenized blocks, and the shards."""
    tokenized = []

    def tokenize_all(blocks):
        for block in blocks:
            tokenized.append(block)
            yield block, tokenize(block)

    given = text_blocks(BLOCKS) if blocks is None else blocks
    result = make_shards(root, key, given, tokenize_all)
    return len(tokenized), result


def files(root):
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_a_shard_has_64_blocks_as_one_batch_each_in_order(tmp_path):
    tokenized, shards = make(tmp_path)
    assert (tokenized, [shard.blocks for shard in shards]) == (BLOCKS, [64, 64, 5])
    rows = []
    for shard in range(3):
        with pa.memory_map(str(tmp_path / f"train/{shard:05d}.arrow")) as source, pa.ipc.open_file(source) as reader:
            assert reader.num_record_batches <= 64
            rows += reader.read_all()["source_row"].to_pylist()
    assert rows == sorted(rows)


def test_the_documented_line_opens_the_tokens_with_datasets(tmp_path, monkeypatch):
    """The shards with the library that most users know, and not only with this program."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    make(tmp_path / "data/tokens")
    documented = (ROOT / "docs/data.md").read_text(encoding="utf-8").splitlines()
    [line] = [line for line in documented if line.startswith("datasets.")]
    rows = eval(line, {"datasets": datasets})
    expected = read_tokens(tmp_path / "data/tokens/train")
    assert rows["input_ids"][:] == [row["input_ids"] for row in expected] and rows[-1] == expected[-1]


def test_finished_shards_are_not_made_again(tmp_path):
    make(tmp_path)
    before = files(tmp_path)
    assert make(tmp_path)[0] == 0
    (tmp_path / "done/00001.json").unlink()
    (tmp_path / "train/00001.arrow").write_bytes(b"half")
    assert make(tmp_path)[0] == 64
    assert files(tmp_path) == before


@pytest.mark.parametrize("name", ["train/00000.arrow", "heldout-index/00000.arrow", "done/00000.json"])
@pytest.mark.parametrize("damage", ["truncated", "high bit", "low bit", "gone"])
def test_a_damaged_shard_is_made_again(tmp_path, name, damage):
    make(tmp_path)
    before = files(tmp_path)
    content = bytearray(before[name])
    content[len(content) // 2] ^= 0x01 if damage == "low bit" else 0x80
    (tmp_path / name).write_bytes(content[:-1] if damage == "truncated" else content)
    if damage == "gone":
        (tmp_path / name).unlink()
    assert make(tmp_path)[0] == 64
    assert files(tmp_path) == before


def test_shards_of_another_key_are_made_again(tmp_path):
    make(tmp_path)
    assert make(tmp_path, key="other")[0] == BLOCKS
    assert finished_shard(tmp_path, 0, "other") is not None and finished_shard(tmp_path, 0, "k") is None


def test_a_finished_shard_of_other_bytes_is_deleted(tmp_path):
    """A source edited after it was pinned, then restored: shards of the edited bytes must not be used."""
    make(
        tmp_path, [replace(block, payload=b"edited") if block.number == 70 else block for block in text_blocks(BLOCKS)]
    )
    with pytest.raises(UserError, match="shard 1 was made from other bytes than the source holds now"):
        make(tmp_path)
    assert make(tmp_path)[0] == BLOCKS
    make(tmp_path.with_name("clean"))
    assert files(tmp_path) == files(tmp_path.with_name("clean"))


def test_an_error_leaves_the_finished_shards_and_no_half_one(tmp_path):
    """A run that was refused or interrupted resumes at the shard that it had begun."""

    def fail_at_100(block):
        if block.number == 100:
            raise UserError("rows.txt:302: is bad")
        return tokenize_bytes(block)

    with pytest.raises(UserError, match="is bad"):
        make(tmp_path, tokenize=fail_at_100)
    assert [finished_shard(tmp_path, number, "k") is not None for number in range(3)] == [True, False, False]
    assert make(tmp_path)[0] == BLOCKS - 64


def test_the_first_100_rejected_rows_are_listed(tmp_path):
    blocks = [replace(block, payload=b"\n".join([b"bad"] * 70)) for block in text_blocks(2)]
    _, [shard] = make(tmp_path, blocks)
    assert len(shard.tally.rejects) == 100 and shard.tally.counts[0]["bad_rows"] == 140
    assert finished_shard(tmp_path, 0, "k") == shard


def refuse(text):
    raise AssertionError(text)


def test_a_work_directory_remains_only_after_an_error_with_finished_shards(tmp_path):
    with work_directory(tmp_path, "k", refuse) as root:
        (root / "half").write_text("")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(KeyboardInterrupt), work_directory(tmp_path, "k", refuse):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(KeyboardInterrupt), work_directory(tmp_path, "k", refuse) as root:
        make(root)
        raise KeyboardInterrupt
    assert finished_shard(tmp_path / "k", 0, "k")


def test_stale_work_is_removed_unless_a_process_works_in_it(tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old/file").write_text("")
    with work_directory(tmp_path, "live", refuse), work_directory(tmp_path, "new", refuse):
        assert sorted(path.name for path in tmp_path.iterdir()) == ["live", "new"]


def lock_until(root, ready, release):
    with work_directory(root, "k", refuse):
        ready.set()
        release.wait(30)


@pytest.mark.multiprocess
def test_a_second_run_of_the_same_work_waits_with_a_note(tmp_path):
    context = multiprocessing.get_context("spawn")
    ready, release = context.Event(), context.Event()
    other = context.Process(target=lock_until, args=(tmp_path, ready, release))
    other.start()
    assert ready.wait(30)
    notes = []

    def notify(text):
        notes.append(text)
        release.set()

    with work_directory(tmp_path, "k", notify):
        pass
    other.join(30)
    assert other.exitcode == 0
    assert notes == [f"another tokenize works in {tmp_path / 'k'}; waiting for it to end"]
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file/k: cannot be written"), work_directory(tmp_path / "file", "k", refuse):
        pass
