"""Images that rows name by path are pinned by content, and DVC watches their directories."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lean_finetune.core.atomic_files import read_json
from lean_finetune.pinning import image_pins
from lean_finetune.pinning.watched_links import DIRECTORY_LINKS, MOST_NAMED_LINKS
from tests.processes import run_bounded
from tests.workspace import error, write_rows

ANSWER = {"role": "assistant", "content": "A"}


def row(*images: Any, **others: Any) -> dict[str, Any]:
    """A row with images in its column."""
    question = {"role": "user", "content": "<image>" * len(images)}
    return {"messages": [question, ANSWER], "images": list(images)} | others


def draw(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(path.name.encode())


def pins() -> list[dict[str, Any] | None]:
    """The images of each source in the lock."""
    return [source.get("images") for source in read_json(Path("locks/data.json"))["sources"]]


def links() -> list[str]:
    """Where the links to directories lead, those to nothing left out."""
    found = [os.readlink(Path("locks") / name) for name in DIRECTORY_LINKS]
    return [one for one in found if not one.endswith("README.md")]


def file_links() -> list[str]:
    """Names of the files that are linked one by one."""
    targets = sorted(Path(os.readlink(path)).name for path in Path("locks/watched-files").iterdir())
    return [name for name in targets if name != "README.md"]


def test_images_are_pinned_by_one_hash_and_their_directory_is_watched(pin, tmp_path):
    rows = write_rows(tmp_path / "rows/train.jsonl", [row("images/a.png", "images/b.png"), row("images/a.png"), row()])
    draw(tmp_path / "rows/images/a.png", tmp_path / "rows/images/b.png", tmp_path / "rows/images/unused.png")
    assert pin(rows).exit_code == 0
    [first] = pins()
    assert first is not None
    assert (first["files"], first["missing"], first["bytes"]) == (2, 0, 10)
    assert links() == [str(rows), str(tmp_path / "rows/images")]
    (tmp_path / "rows/images/a.png").write_bytes(b"edited")
    (tmp_path / "rows/images/unused.png").write_bytes(b"edited")
    pin(rows)
    [edited] = pins()
    assert edited is not None and edited["bytes"] == 11 and edited["sha256"] != first["sha256"]
    (tmp_path / "rows/images/b.png").unlink()
    result = pin(rows)
    assert "rows name 1 image that cannot be read; after adding them run `dvc repro -sf pin_data`" in result.stderr
    [removed] = pins()
    assert removed is not None and (removed["files"], removed["missing"]) == (2, 1)
    assert removed["sha256"] not in (first["sha256"], edited["sha256"])


def test_a_source_of_text_has_the_lock_and_the_links_that_it_had(pin, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", [{"messages": [{"role": "user", "content": "an image of it"}, ANSWER]}])
    pin(rows)
    assert pins() == [None] and "images" not in Path("locks/data.json").read_text()
    assert links() == [str(rows)]


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress("".join(json.dumps(one) + "\n" for one in rows).encode()))
    elif path.suffix == ".csv":
        cells = [json.dumps(one["messages"]).replace('"', '""') for one in rows]
        path.write_text("messages\n" + "".join(f'"{cell}"\n' for cell in cells))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1).replace("image_url", "\\u0069mage_url"))
    else:
        write_rows(path, rows)
    return path


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "jsonl.gz", "csv", "json"])
def test_images_in_content_parts_are_found_in_every_kind_of_file(pin, tmp_path, suffix):
    """A source whose images are not found would not be watched, and training would not notice an edit."""
    parts = [{"type": "text", "text": "Q"}, {"type": "image_url", "image_url": {"url": "a.png"}}]
    answer = {"role": "assistant", "content": [{"type": "text", "text": "A"}]}
    rows = [{"messages": [{"role": "user", "content": parts}, answer]}] * 3
    draw(tmp_path / "rows/a.png")
    pin(written(tmp_path / f"rows/rows.{suffix}", rows))
    [found] = pins()
    assert found is not None and (found["files"], found["missing"], found["bytes"]) == (1, 0, 5)


def test_the_column_of_images_and_unread_columns_are_those_of_the_parameters(pin, tmp_path):
    draw(tmp_path / "a.png", tmp_path / "b.png")
    rows = write_rows(tmp_path / "rows.jsonl", [row("a.png", photo="b.png")])
    digests = set()
    for values in ({}, {"ignore_columns": ["images"]}, {"columns": {"images": "photo"}}, {"columns": {"images": "p"}}):
        pin(rows, **values)
        [found] = pins()
        digests.add(found and found["sha256"])
    assert len(digests) == 3
    pin([{"source": str(rows), "columns": {"images": "photo"}}], columns={"images": "images"})
    assert pins()[0]["sha256"] in digests  # type: ignore[index]


def test_images_within_rows_and_what_tokenize_refuses_are_left_out(pin, tmp_path, monkeypatch):
    """A pipe or a device would be read for ever; a row at fault is a matter of data.on_bad_row."""
    monkeypatch.setattr(image_pins, "MAX_IMAGE_BYTES", 10)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large.png").write_bytes(bytes(11))
    values = [
        "data:image/png;base64,QQ==",
        "https://a.b/c.png",
        "../secret",
        5,
        {"path": "pipe"},
        "/dev/zero",
        "large.png",
    ]
    bad = '{"messages": "image", "images": {"a": [\n'
    rows = write_rows(tmp_path / "rows.jsonl", [row(value) for value in values])
    rows.write_text(rows.read_text() + bad)
    assert pin(rows).exit_code == 0
    [found] = pins()
    assert found is not None and (found["files"], found["missing"], found["bytes"]) == (3, 2, 11)


def test_names_that_no_file_can_have_are_left_out(pin, tmp_path):
    """A text of 300 letters in a column of images ended in a traceback: `File name too long`."""
    long = f"{'x' * 300}/{'y' * 300}.png"
    (tmp_path / "loop").symlink_to("loop")
    rows = write_rows(tmp_path / "rows/train.jsonl", [row(long), row(f"/{long}"), row(f"{tmp_path}/loop/a.png")])
    result = pin(rows)
    assert result.exit_code == 0 and "rows name 3 images that cannot be read" in result.stderr, result.output


def test_images_in_a_directory_or_beside_a_glob_are_watched_with_it(pin, tmp_path):
    rows = [write_rows(tmp_path / f"rows/{k}/train.jsonl", [row("a.png")]) for k in range(2)]
    draw(tmp_path / "rows/0/a.png")
    for source in (tmp_path / "rows", tmp_path / "rows/*/*.jsonl"):
        pin(source)
        [found] = pins()
        assert found is not None and (found["files"], found["missing"]) == (2, 1), rows
        assert links() == [str(tmp_path / "rows")] and file_links() == []


def test_more_directories_than_links_are_watched_by_one_around_them(pin, tmp_path):
    """LLaVA's rows name images in six directories."""
    names = [f"data/{name}/train/a.png" for name in ("coco", "gqa", "ocr", "text", "vg")]
    rows = write_rows(tmp_path / "rows/train.jsonl", [row(name) for name in names])
    draw(*(tmp_path / "rows" / name for name in names))
    assert "note" not in pin(rows).stderr
    assert links() == [str(rows), str(tmp_path / "rows/data")] and file_links() == []


def test_images_beside_the_project_are_linked_one_by_one(pin, workspace):
    """DVC would watch the directory that it writes."""
    count = MOST_NAMED_LINKS + 3
    rows = write_rows(workspace / "train.jsonl", [row(f"{k}.png") for k in range(count)])
    draw(*(workspace / f"{k}.png" for k in range(count)))
    result = pin(rows)
    assert "DVC does not notice changes of 3 images, such as " in result.stderr
    assert links() == ["../train.jsonl"] and len(file_links()) == MOST_NAMED_LINKS
    write_rows(rows, [row("0.png"), row("gone.png")])
    assert "does not notice" not in pin(rows).stderr and file_links() == ["0.png"]


def test_absolute_paths_of_many_directories_are_linked_one_by_one(pin, tmp_path):
    """A directory around them may be the whole disk."""
    paths = [tmp_path / f"{k}/a{k}.png" for k in range(6)]
    draw(*paths)
    rows = write_rows(tmp_path / "rows.jsonl", [row(str(path)) for path in paths])
    pin(rows)
    assert links() == [str(rows), *(str(tmp_path / f"{k}") for k in range(3))]
    assert file_links() == ["a3.png", "a4.png", "a5.png"]


def test_images_that_git_neither_tracks_nor_ignores_are_refused(pin, workspace):
    """`dvc exp apply` would delete them."""
    rows = write_rows(workspace / "rows/train.jsonl", [row("images/a.png")])
    draw(workspace / "rows/images/a.png")
    run_bounded(["git", "init", "-q"], cwd=workspace, check=True)
    run_bounded(["git", "add", "rows/train.jsonl"], cwd=workspace, check=True)
    (workspace / "dvc.yaml").write_text("")
    run_bounded(["git", "add", "dvc.yaml"], cwd=workspace, check=True)
    assert "git neither tracks nor ignores rows/images" in error(pin(rows))
    (workspace / ".git/info/exclude").write_text("/rows/images/\n")
    assert pin(rows).exit_code == 0
