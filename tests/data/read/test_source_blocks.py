"""Blocks of rows: each row once, in bounded memory, from unchanged files."""

import csv
import gzip
import json
import os
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lean_finetune.core.errors import UserError
from lean_finetune.data.read.decode_rows import decode
from lean_finetune.data.read.source_blocks import file_names, read_blocks
from tests.conftest import ROOT
from tests.data.read.common import arrow, blocks_of, lock_of, parquet, rows_of, source, values_of, zstd
from tests.processes import run_bounded
from tests.workspace import write_rows

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
ROWS = st.lists(st.dictionaries(st.text(), JSON, max_size=3), min_size=1, max_size=5)
CELLS = st.text(st.characters(exclude_characters="\0\r", exclude_categories=["Cs"]), max_size=6)
FEW_EXAMPLES = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@given(rows=ROWS, indent=st.sampled_from([None, 0, 2]), ascii_only=st.booleans(), block=st.integers(6, 40))
@FEW_EXAMPLES
def test_an_array_read_in_blocks_equals_the_complete_array(tmp_path, rows, indent, ascii_only, block):
    """A value, an escape or a character that a block's end splits must neither be lost nor become a fault."""
    path = tmp_path / "rows.json"
    text = json.dumps(rows, indent=indent, ensure_ascii=ascii_only)
    path.write_bytes(b"\xef\xbb\xbf\n " + text.encode("utf-8", "replace") + b"\n")
    assert values_of(path, block_bytes=block) == json.loads(path.read_bytes())


@given(rows=ROWS, indent=st.sampled_from([0, 2]), block=st.integers(6, 40), is_wrapped=st.booleans())
@FEW_EXAMPLES
def test_objects_in_an_object_or_over_several_lines_are_read_in_blocks(tmp_path, rows, indent, block, is_wrapped):
    """Pretty-printed objects and wrapped arrays are read completely, wherever a block ends."""
    path = tmp_path / "rows.json"
    rows = [{"": None, **row} for row in rows]  # an object without a key is one line
    wrapped = {"version": "1", "data": rows, "end": None}
    path.write_text(
        json.dumps(wrapped, indent=indent) if is_wrapped else "\n".join(json.dumps(row, indent=indent) for row in rows)
    )
    assert values_of(path, block_bytes=block) == rows


@given(rows=ROWS, block=st.integers(5, 40), end=st.sampled_from([b"\n", b"\r\n", b"\n\n"]), last=st.booleans())
@FEW_EXAMPLES
def test_lines_read_in_blocks_equal_the_lines(tmp_path, rows, block, end, last):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + end.join(json.dumps(row).encode() for row in rows) + (end if last else b""))
    assert values_of(path, block_bytes=block) == rows
    stride = end.count(b"\n")
    assert [row.line for row in rows_of(path, block_bytes=block)] == [1 + stride * k for k in range(len(rows))]


@given(rows=st.lists(st.lists(CELLS, min_size=2, max_size=2), max_size=6), block=st.integers(5, 40))
@FEW_EXAMPLES
def test_a_table_read_in_blocks_equals_what_the_csv_module_reads(tmp_path, rows, block):
    path = tmp_path / "rows.csv"
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["a", "b"], *rows])
    assert values_of(path, block_bytes=block) == [{"a": one, "b": two} for one, two in rows]


def test_rows_of_arrays_and_tables_have_the_line_of_their_first_character(tmp_path):
    array, table = tmp_path / "rows.json", tmp_path / "rows.csv"
    array.write_text('[\n  {"a":\n 1},\n\n  {"a": 2}, {"a": 3}\n]\n')
    assert [(row.line, row.number) for row in rows_of(array)] == [(2, 0), (5, 1), (5, 2)]
    table.write_text('a,b\n"1\n2",3\n\n4,5\n6\n7,8\n')
    rows = [(2, 0, None), (5, 1, None), (6, 2, "a row must have 2 cells"), (7, 3, None)]
    found = [(row.line, row.number, row.fault and row.fault[:23]) for row in rows_of(table)]
    assert found == rows
    assert [row.number for row in rows_of(table, block_bytes=2)] == [0, 1, 2, 3]


RECORDS = [{"text": f"row {k} – ü", "tags": [str(k)] * (k % 3), "more": {"k": k}} for k in range(500)]


def write_all(directory: Path, rows: list[dict]) -> list[Path]:
    """The same rows in every format with nested values."""
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    table = pa.Table.from_pylist(rows)
    contents = {
        "rows.jsonl": lines,
        "rows.ndjson": lines,
        "rows.json": json.dumps(rows).encode(),
        "rows.jsonl.gz": gzip.compress(lines[:1000]) + gzip.compress(lines[1000:]),
        "rows.jsonl.zst": zstd(lines[:1000]) + zstd(lines[1000:]),
        "rows.parquet": parquet(table),
        "file.arrow": arrow(table, True),
        "stream.arrow": arrow(table, False),
        "stream.arrow.zst": zstd(arrow(table, False)),
    }
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (directory / name).write_bytes(content)
    return [directory / name for name in contents]


@pytest.fixture(scope="module")
def every_format(tmp_path_factory) -> list[Path]:
    return write_all(tmp_path_factory.mktemp("formats"), RECORDS)


def test_every_file_format_gives_the_same_rows_in_blocks_of_the_requested_size(every_format):
    for path in every_format:
        for block_bytes in (1 << 20, 1000):
            assert values_of(path, block_bytes=block_bytes) == RECORDS, path.name
            assert [row.number for row in rows_of(path, block_bytes=block_bytes)] == list(range(500))
        blocks = blocks_of(lock_of(source(path)), block_bytes=4000)
        assert len(blocks) > 3 and [block.number for block in blocks] == list(range(len(blocks))), path.name
        assert max(len(block.payload) for block in blocks) < 20_000, path.name


def test_tables_and_text_and_saved_folders_give_their_rows(tmp_path):
    flat = [{"prompt": f'say "{k}",\nplease', "completion": str(k)} for k in range(50)]
    for name, delimiter in (("rows.csv", ","), ("rows.tsv", "\t")):
        with open(tmp_path / name, "w", newline="") as file:
            writer = csv.DictWriter(file, list(flat[0]), delimiter=delimiter)
            writer.writeheader()
            writer.writerows(flat)
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress((tmp_path / name).read_bytes()))
        assert values_of(tmp_path / name) == values_of(tmp_path / f"{name}.gz") == flat
    (tmp_path / "rows.txt").write_bytes(b"one\r\n\n  two \n\xef\xbb\xbfthree")
    assert values_of(tmp_path / "rows.txt") == [{"text": "one"}, {"text": "  two "}, {"text": "\ufeffthree"}]
    DatasetDict({"train": Dataset.from_list(flat)}).save_to_disk(tmp_path / "saved")
    assert values_of(tmp_path / "saved/train/data-00000-of-00001.arrow") == flat


@pytest.mark.parametrize("block_bytes", [300, 1 << 20])
def test_max_rows_takes_the_first_rows_of_every_format(every_format, block_bytes):
    for path in every_format:
        for rows in (1, 3, 7, 499, 501):
            assert values_of(path, rows, block_bytes) == RECORDS[:rows], path.name


def test_a_bad_row_counts_as_a_row(tmp_path):
    """Otherwise a limit would read further rows in place of bad ones."""
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n3\n4,5\n6,7\n")
    assert [row.line for row in rows_of(tmp_path / "rows.csv", max_rows=3)] == [2, 3, 4]
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n\n{\n{"a": 2}\n')
    assert [row.line for row in rows_of(tmp_path / "rows.jsonl", max_rows=2)] == [1, 3]


def test_limits_count_over_files_and_sources_and_later_files_stay_closed(tmp_path):
    paths = [write_rows(tmp_path / f"{k}.jsonl", [{"k": k}, {"k": k}, {"k": k}]) for k in range(4)]
    lock = lock_of(source(paths[0], paths[1], rows=4), source(paths[2]), source(paths[3]))
    paths[3].unlink()
    blocks = blocks_of(lock, max_rows=6)
    assert [row.value["k"] for block in blocks for row in decode(block) if row.value] == [0, 0, 0, 1, 2, 2]
    assert [(block.number, block.source, block.file) for block in blocks] == [(0, 0, 0), (1, 0, 1), (2, 1, 2)]
    assert file_names(lock)[1:] == [str(path) for path in paths[1:]]


@pytest.mark.parametrize("max_rows", [None, 1])
def test_a_file_that_changed_since_it_was_pinned_is_refused(tmp_path, max_rows):
    """Even if only its first rows are read and only its end changed."""
    for path in write_all(tmp_path, RECORDS):
        lock = lock_of(source(path))
        path.write_bytes(path.read_bytes() + b" \n")
        with pytest.raises(UserError, match=f"{path.name}: changed since it was pinned; run `dvc repro` again$"):
            blocks_of(lock, max_rows)
        path.unlink()
        with pytest.raises(UserError, match=f"{path.name}: cannot be read any more"):
            blocks_of(lock, max_rows)


def test_a_reader_that_stops_early_raises_nothing(tmp_path):
    """An error of the consumer must not be replaced by one about the rest of the file."""
    path = write_rows(tmp_path / "rows.jsonl", RECORDS)
    lock = lock_of(source(path))
    path.write_bytes(path.read_bytes()[:-1] + b" ")
    blocks = read_blocks(lock, max_rows=None, progress=lambda _: None, block_bytes=1000)
    assert next(blocks).number == 0
    blocks.close()  # type: ignore[attr-defined]
    assert next(blocks, None) is None


def test_a_file_pinned_by_gits_blob_id_is_checked_too(tmp_path):
    """The hub identifies small files by it."""
    path = write_rows(tmp_path / "rows.jsonl", [{"text": "hello"}])
    blob_id = run_bounded(["git", "hash-object", path], check=True).stdout.strip()
    lock = lock_of(source(path))
    del lock["sources"][0]["files"][0]["sha256"]
    lock["sources"][0]["files"][0]["blob_id"] = blob_id
    assert len(blocks_of(lock)) == 1
    write_rows(path, [{"text": "jello"}])
    with pytest.raises(UserError, match="changed since it was pinned"):
        blocks_of(lock)


def test_progress_adds_up_to_the_bytes_on_disk(tmp_path):
    paths = write_all(tmp_path, RECORDS)
    read: list[int] = []
    list(read_blocks(lock_of(*map(source, paths)), max_rows=None, progress=read.append))
    assert sum(read) == sum(path.stat().st_size for path in paths)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    """Otherwise the writer of the tokens would report a full disk. /proc/self/mem starts with unreadable memory."""
    memory = Path("/proc/self/mem")
    if not memory.exists():
        pytest.skip("this system shows no process's memory as a file")
    (tmp_path / "rows.jsonl").symlink_to(memory)
    file = {"path": "rows.jsonl", "bytes": 0, "sha256": "0" * 64}
    given = {"source": str(tmp_path / "rows.jsonl"), "kind": "file", "revision": None, "rows": None, "files": [file]}
    with pytest.raises(UserError, match="rows.jsonl: cannot be read \\(Input/output error\\)"):
        blocks_of(lock_of(given))


@pytest.mark.parametrize("change", ["replaced", "written to", "removed"])
def test_a_table_that_changes_while_it_is_read_is_refused(tmp_path, change):
    """Its hash is compared before it is read, since its reader needs to seek."""
    path = tmp_path / "rows.parquet"
    path.write_bytes(parquet([{"text": f"{n} " * 1000} for n in range(64)]))
    blocks = read_blocks(lock_of(source(path)), max_rows=None, progress=lambda _: None, block_bytes=4096)
    next(blocks)
    if change == "written to":
        os.utime(path, ns=(1, 1))
    else:
        path.unlink()
    if change == "replaced":
        path.write_bytes(parquet([{"text": "other"}]))
    with pytest.raises(UserError, match="rows.parquet: changed since it was pinned"):
        list(blocks)


def test_a_file_that_changed_is_called_so_before_its_rows_are_judged(tmp_path):
    """A bad row of the new content would be named at its line, and `dvc repro` would pin other bytes than were read."""
    path = write_rows(tmp_path / "rows.jsonl", [{"text": "a"}] * 9)
    lock = lock_of(source(path))
    path.write_text("{")
    with pytest.raises(UserError, match="rows.jsonl: changed since it was pinned"):
        next(iter(read_blocks(lock, max_rows=None, progress=lambda _: None)))


def test_a_pipe_in_place_of_a_file_is_refused_at_once(tmp_path):
    """Opening one waits for a writer."""
    path = write_rows(tmp_path / "rows.jsonl", [{"text": "a"}])
    lock = lock_of(source(path))
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UserError, match="rows.jsonl: is no regular file any more"):
        blocks_of(lock)


def test_a_lock_of_an_older_version_is_refused():
    with pytest.raises(
        UserError,
        match=r"^locks/data.json: is not as pin_data of .* \(schema: .*run `dvc repro pin_data`",
    ):
        blocks_of({"source": "rows.jsonl", "files": []})


MEASURE = """
import os
import sys
from lean_finetune.core.atomic_files import read_json
from pathlib import Path
from lean_finetune.data.read.source_blocks import read_blocks
for block in read_blocks(read_json(Path(sys.argv[1])), max_rows=None, progress=lambda n: None):
    pass
# Not getrusage: its peak is inherited from whoever started the process.
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_input(tmp_path):
    """Ten times the rows, in one row group or one array, need at most 16 MiB more."""
    if not Path("/proc/self/status").exists():
        pytest.skip("this system shows no peak memory of a process")
    small = [{"text": "some words of text " * 20, "k": k} for k in range(8_000)]
    peaks: dict[str, list[int]] = {}
    for times in (1, 10):
        table = pa.concat_tables([pa.Table.from_pylist(small)] * times)
        folder = tmp_path / str(times)
        folder.mkdir()
        lines = "".join(json.dumps(row) + "\n" for row in small)
        (folder / "rows.jsonl").write_text(lines * times)
        (folder / "rows.json").write_text("[" + ",".join([lines.rstrip().replace("\n", ",\n")] * times) + "]")
        (folder / "rows.jsonl.gz").write_bytes(gzip.compress(lines.encode(), 1) * times)
        (folder / "rows.csv").write_text("text,k\n" + "some words of text,1\n" * 160_000 * times)
        pq.write_table(table, folder / "rows.parquet", row_group_size=len(table))
        for path in sorted(folder.iterdir()):
            lock = tmp_path / "lock.json"
            lock.write_text(json.dumps(lock_of(source(path))))
            command = [sys.executable, "-c", MEASURE, str(lock)]
            done = run_bounded(command, cwd=ROOT, check=True)
            peaks.setdefault(path.name, []).append(int(done.stdout) // 1024)
    assert all(large <= small + 16 for small, large in peaks.values()), peaks
