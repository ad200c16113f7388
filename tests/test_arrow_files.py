"""Arrow files between stages: every change of a value, a batch or the schema is found when it is read."""

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from lean_finetune.core.arrow_files import ArrowWriter, open_batches, read_column
from lean_finetune.core.errors import UserError

SCHEMA = pa.schema(
    [
        ("length", pa.int32()),
        ("ids", pa.list_(pa.uint16())),
        ("family", pa.string()),
        ("dropped", pa.bool_()),
        ("hashes", pa.list_(pa.binary(32))),
    ],
    {"layout": "padded", "ranks": "1"},
)
COLUMNS: dict[str, Any] = {name: (SCHEMA.field(name).type,) for name in SCHEMA.names}


def batch(rows: int, seed: int = 0) -> pa.RecordBatch:
    draw = np.random.default_rng(seed)
    lengths = draw.integers(1, 9, rows)
    values = [
        lengths.astype(np.int32),
        [draw.integers(0, 9999, length).tolist() for length in lengths],
        [None if row % 3 == 0 else f"family {row}" for row in range(rows)],
        draw.random(rows) < 0.5,
        [[bytes([row % 256]) * 32] * (row % 2) for row in range(rows)],
    ]
    return pa.record_batch([pa.array(value, field.type) for value, field in zip(values, SCHEMA, strict=True)], SCHEMA)


def written(path: Path, batches: list[pa.RecordBatch], **options: Any) -> Path:
    with ArrowWriter(path, SCHEMA, pa.ipc.IpcWriteOptions(use_threads=False, **options)) as writer:
        for one in batches:
            writer.write(one)
    return path


def everything(path: Path) -> list[Any]:
    """All that a reader can see of a file."""
    batches = open_batches(path, COLUMNS)
    return [
        sorted(batches[0].schema.metadata.items()),
        *({n: b.column(n).to_pylist() for n in COLUMNS} for b in batches),
    ]


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_changed_byte_anywhere_is_found_or_changes_nothing(tmp_path: Path, compression: str | None):
    """Rows of other tokens were trained, with exit code 0."""
    path = written(tmp_path / "a.arrow", [batch(20), batch(7, 1), batch(9, 2)], compression=compression)
    content, before, draw = path.read_bytes(), everything(path), random.Random(1)
    found = 0
    for _ in range(120):
        changed = bytearray(content)
        changed[draw.randrange(len(content))] ^= draw.randrange(1, 256)
        path.write_bytes(changed)
        try:
            assert everything(path) == before
        except UserError as error:
            assert "delete it and run `dvc repro`" in str(error)
            found += 1
    assert found > 60


def test_batches_that_are_lost_or_in_another_order_are_found(tmp_path: Path):
    """A plan without its last steps, which trains fewer."""
    batches = [batch(5), batch(5, 1), batch(5, 2)]
    written(tmp_path / "whole.arrow", batches)
    reader = pa.ipc.open_file(str(tmp_path / "whole.arrow"))
    stored = [reader.get_batch_with_custom_metadata(number) for number in range(3)]
    wrong = {
        (0, 1): "the end is missing after batch 1",
        (0, 2, 1): "the end is missing",
        (1, 0, 2): "of batch 0 differs",
    }
    for order, says in wrong.items():
        with pa.ipc.new_file(str(tmp_path / "other.arrow"), SCHEMA) as writer:
            for number in order:
                writer.write_batch(stored[number].batch, custom_metadata=stored[number].custom_metadata)
        with pytest.raises(UserError, match=says):
            open_batches(tmp_path / "other.arrow", COLUMNS)


def test_only_what_is_read_is_compared(tmp_path: Path):
    """Opening tokens of a terabyte would read all of them."""
    path = written(tmp_path / "a.arrow", [batch(20)])
    ids = open_batches(path, COLUMNS)[0].column("ids").flatten().to_numpy().tobytes()
    content = path.read_bytes()
    assert content.count(ids) == 1
    path.write_bytes(content.replace(ids, bytes([ids[0] ^ 1]) + ids[1:]))
    [lazy] = open_batches(path, COLUMNS, check_values=False)
    assert len(read_column([lazy], "length", np.int32)) == 20
    with pytest.raises(UserError, match="column ids of batch 0 differs from its checksum: the file was changed"):
        lazy.column("ids")


def test_a_file_of_another_program_is_refused(tmp_path: Path):
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), SCHEMA) as writer:
        writer.write_batch(batch(3))
    with pytest.raises(UserError, match="batch 0 has no checksums, so another program wrote it; delete it"):
        open_batches(tmp_path / "a.arrow", {})


def test_slices_and_empty_batches_are_read_back(tmp_path: Path):
    """A slice shares its buffers with rows that are not in the file."""
    whole = batch(30)
    path = written(tmp_path / "a.arrow", [whole.slice(3, 9), whole.slice(0, 0), whole.slice(29)])
    assert read_column(open_batches(path, COLUMNS), "length", np.int32).tolist() == [
        *whole.column("length").to_pylist()[3:12],
        whole.column("length").to_pylist()[29],
    ]
    assert open_batches(written(tmp_path / "none.arrow", []), COLUMNS) == []


def test_an_error_leaves_a_file_without_an_end(tmp_path: Path):
    with pytest.raises(ZeroDivisionError), ArrowWriter(tmp_path / "a.arrow", SCHEMA) as writer:
        writer.write(batch(3))
        writer.write(batch(3))
        1 / 0  # noqa: B018
    with pytest.raises(UserError, match="the end is missing after batch 0"):
        open_batches(tmp_path / "a.arrow", {})


@pytest.mark.parametrize("kind", ["pipe", "directory", "device", "loop"])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, kind: str):
    """A pipe waits for a writer, for ever."""
    path = tmp_path / "a.arrow"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if kind == "device" else path)
    with pytest.raises(
        UserError, match="is no regular file; delete it|not a complete Arrow file .*(symbolic links|Is a directory)"
    ):
        open_batches(path, {})
