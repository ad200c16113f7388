"""Shards: resumed, damaged, or made from other bytes; and their directory, locked by one process."""

import json
import multiprocessing
from dataclasses import replace

import pyarrow as pa
import pytest

from lean_finetune.core.errors import UserError
from lean_finetune.core.file_locks import LOCK_FILE
from lean_finetune.data.shards.parts import TokenizePart
from lean_finetune.data.shards.shard_files import BLOCKS_PER_SHARD, read_marker
from lean_finetune.data.shards.tokenize_run import make_shards
from lean_finetune.data.shards.unfinished_work import locked_directory, work_directory
from lean_finetune.data.shards.worker_pool import open_pool
from tests.data.tokens import standin
from tests.data.tokens.standin import make_byte_tokenizer, text_blocks

BLOCKS = 2 * BLOCKS_PER_SHARD + 5


def make(root, blocks=None, key="k", part=0, parts=1, fails=True):
    """Make shards; the numbers of the blocks that were tokenized, and the result."""
    tokenized: list[object] = []
    with open_pool(standin.tokenize_bytes, make_byte_tokenizer, 1, "threads") as pool:
        result = make_shards(
            root,
            key,
            TokenizePart(number=part, of=parts),
            text_blocks(BLOCKS) if blocks is None else blocks,
            pool,
            ["rows.txt"],
            fails,
            tokenized.append,
        )
    return len(tokenized), *result


def files(root):
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_a_shard_holds_64_blocks_one_batch_each_in_order(tmp_path):
    tokenized, shards, number = make(tmp_path)
    assert (tokenized, number) == (BLOCKS, 3)
    assert [shard.blocks for shard in shards] == [64, 64, 5]
    rows = []
    for shard in range(3):
        with pa.memory_map(str(tmp_path / f"train/{shard:05d}.arrow")) as source, pa.ipc.open_file(source) as reader:
            assert reader.num_record_batches <= 64
            rows += reader.read_all()["source_row"].to_pylist()
    assert rows == sorted(rows)


def test_finished_shards_are_not_made_again(tmp_path):
    make(tmp_path)
    before = files(tmp_path)
    assert make(tmp_path)[0] == 0
    (tmp_path / "done/00001.json").unlink()
    (tmp_path / "train/00001.arrow").write_bytes(b"half")
    assert make(tmp_path)[0] == 64
    assert files(tmp_path) == before


@pytest.mark.parametrize("name", ["train/00000.arrow", "heldout-index/00000.arrow", "done/00000.json"])
@pytest.mark.parametrize("damage", ["cut", "high bit", "low bit", "gone"])
def test_a_damaged_shard_is_noticed_and_made_again(tmp_path, name, damage):
    make(tmp_path)
    before = files(tmp_path)
    path = tmp_path / name
    content = bytearray(before[name])
    if damage == "gone":
        path.unlink()
    else:
        content[len(content) // 2] ^= 0x01 if damage == "low bit" else 0x80
        path.write_bytes(content[:-1] if damage == "cut" else content)
    assert make(tmp_path)[0] == 64
    assert files(tmp_path) == before


def test_shards_of_another_key_are_made_again(tmp_path):
    make(tmp_path)
    assert make(tmp_path, key="other")[0] == BLOCKS
    shard = read_marker(tmp_path, 0)
    assert shard is not None and shard.key == "other"


def test_a_finished_shard_of_other_bytes_is_thrown_away(tmp_path):
    """A source edited after it was pinned, then put back: what was made of the edited bytes must not stay."""
    edited = [replace(block, payload=b"edited") if block.number == 70 else block for block in text_blocks(BLOCKS)]
    make(tmp_path, edited)
    with pytest.raises(UserError, match="shard 1 was made from other bytes than the source holds now"):
        make(tmp_path)
    assert make(tmp_path)[0] == BLOCKS
    after = files(tmp_path)
    make(tmp_path / "clean")
    assert after == files(tmp_path / "clean")


def test_a_bad_row_is_refused_with_its_line_and_earlier_shards_stay(tmp_path):
    blocks = [replace(block, payload=b"fine\nbad\nbad") if block.number == 100 else block for block in text_blocks(130)]
    with pytest.raises(UserError, match=r"^rows\.txt:302: is bad$"):
        make(tmp_path, blocks)
    assert read_marker(tmp_path, 0) is not None and read_marker(tmp_path, 1) is None
    _, shards, _ = make(tmp_path, blocks, fails=False)
    assert [tuple(one) for one in shards[1].rejects] == [(0, 301, 302, "is bad"), (0, 302, 303, "is bad")]
    assert shards[1].counts["0"]["bad_rows"] == 2


def test_the_first_100_rejected_rows_are_listed(tmp_path):
    blocks = [replace(block, payload=b"\n".join([b"bad"] * 70)) for block in text_blocks(2)]
    _, [shard], _ = make(tmp_path, blocks, fails=False)
    assert len(shard.rejects) == 100 and shard.counts["0"]["bad_rows"] == 140


def test_parts_share_the_shards_out(tmp_path):
    made = [make(tmp_path / str(part), part=part, parts=2) for part in range(2)]
    assert [tokenized for tokenized, _, _ in made] == [64 + 5, 64]
    assert [number for _, _, number in made] == [3, 3]
    make(tmp_path / "whole")
    parts = {name.partition("/")[2]: data for part in "01" for name, data in files(tmp_path).items() if name[0] == part}
    assert parts == files(tmp_path / "whole")


def refuse(text):
    raise AssertionError(text)


def test_a_work_directory_is_removed_when_done_and_stays_with_finished_shards_after_an_error(tmp_path):
    with work_directory(tmp_path, "k", refuse) as root:
        (root / "half").write_text("")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(KeyboardInterrupt), work_directory(tmp_path, "k", refuse):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(KeyboardInterrupt), work_directory(tmp_path, "k", refuse) as root:
        (root / "done").mkdir()
        (root / "done/00000.json").write_text("{}")
        raise KeyboardInterrupt
    assert (tmp_path / "k/done/00000.json").exists()


def test_stale_work_goes_but_not_that_of_a_living_process(tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old/file").write_text("")
    with work_directory(tmp_path, "live", refuse), work_directory(tmp_path, "new", refuse):
        assert sorted(path.name for path in tmp_path.iterdir()) == ["live", "new"]


def hold(root, ready, release):
    with work_directory(root, "k", refuse):
        ready.set()
        release.wait(30)


@pytest.mark.multiprocess
def test_a_second_run_of_the_same_work_waits_with_a_note(tmp_path):
    context = multiprocessing.get_context("spawn")
    ready, release = context.Event(), context.Event()
    other = context.Process(target=hold, args=(tmp_path, ready, release))
    other.start()
    assert ready.wait(30)
    told = []

    def note(text):
        told.append(text)
        release.set()

    with work_directory(tmp_path, "k", note) as root:
        assert (root / LOCK_FILE).exists()
    other.join(30)
    assert other.exitcode == 0
    assert told == [f"another tokenize works in {tmp_path / 'k'}; waiting for it to end"]
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UserError, match="file/part: cannot be written"),
        locked_directory(tmp_path / "file" / "part", refuse),
    ):
        pass


def test_markers_say_the_same_on_every_machine(tmp_path):
    """No time, host name or path: parts are compared by hash."""
    make(tmp_path / "a")
    make(tmp_path / "b")
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert set(json.loads((tmp_path / "a/done/00000.json").read_text())) == {
        *("key", "number", "blocks", "input_crc32", "files", "counts", "rejects", "first", "unread", "sha256")
    }
