"""An image is read from the row or from its file, and never from outside of the directory without the user's word."""

import hashlib
import os
import socket
from contextlib import chdir
from pathlib import Path

import pytest

from lean_finetune.core.errors import RowFault, UserError
from lean_finetune.data.format.given_images import GivenImage
from lean_finetune.images import image_store
from lean_finetune.images.image_files import IMAGES, ImageFiles, image_file
from lean_finetune.images.image_store import read_image
from lean_finetune.pinning.locate import data_files, rows_directory
from tests.data.read.common import lock_of, source
from tests.workspace import write_rows


def read(path: str | None, directory: Path | None, data: bytes | None = None) -> bytes:
    return read_image(GivenImage(path=path, data=data), directory)


def refusal(path: str, directory: Path | None) -> str:
    with pytest.raises(RowFault) as fault:
        read(path, directory)
    text = str(fault.value)
    assert text.startswith("image ") and "\n" not in text
    return text


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A directory with images, and an image beside it."""
    (tmp_path / "rows/images").mkdir(parents=True)
    (tmp_path / "rows/images/a b.png").write_bytes(b"inside")
    (tmp_path / "rows/a.png").write_bytes(b"beside")
    (tmp_path / "outside.png").write_bytes(b"outside")
    return tmp_path / "rows"


def test_images_of_the_row_of_its_directory_and_of_an_absolute_path_are_read(rows: Path):
    assert read("images/a b.png", rows) == b"inside"
    assert read("./images/../a.png", rows) == b"beside"
    assert read(str(rows.parent / "outside.png"), rows) == b"outside"
    assert read("gone.png", rows, b"in the row") == read(None, None, b"in the row") == b"in the row"


def test_a_relative_path_does_not_leave_the_directory(rows: Path):
    """Rows of a stranger would send any file of this machine to the trained model."""
    (rows / "link.png").symlink_to(rows.parent / "outside.png")
    (rows / "up").symlink_to(rows.parent)
    (rows / "fine.png").symlink_to("images/a b.png")
    for path in ("../outside.png", "images/../../outside.png", "link.png", "up/outside.png", "../rows2/a.png"):
        assert f"image {path} is outside of {rows}" in refusal(path, rows)
    assert read("fine.png", rows) == b"inside"
    linked = rows.parent / "linked"
    linked.symlink_to(rows)
    assert read("a.png", linked) == b"beside"


def test_what_is_no_readable_file_is_refused_with_its_path(rows: Path, monkeypatch):
    """A pipe would wait for a writer for ever, and a device would never end."""
    os.mkfifo(rows / "pipe.png")
    (rows / "loop.png").symlink_to("loop.png")
    assert f"image {rows}/gone.png cannot be read (No such file or directory)" in refusal("gone.png", rows)
    assert "cannot be read (Is a directory)" in refusal("images", rows)
    assert "cannot be read (Too many levels of symbolic links)" in refusal("loop.png", rows)
    assert "cannot be read (File name too long)" in refusal("a" * 300, rows)
    assert "image pipe.png is no regular file" in refusal("pipe.png", rows)
    assert "image /dev/zero is no regular file" in refusal("/dev/zero", rows)
    with socket.socket(socket.AF_UNIX) as listening, chdir(rows):  # A path of a socket is short.
        listening.bind("socket.png")
    assert "image socket.png is no regular file" in refusal("socket.png", rows)
    assert "NUL" in refusal("a\0.png", rows) and "surrogate" in refusal("\ud800.png", rows)
    assert "~ is not expanded" in refusal("~/a.png", rows)
    monkeypatch.setattr(image_store, "MAX_IMAGE_BYTES", 5)
    assert "image a.png has more than" in refusal("a.png", rows)


def test_stored_images_that_are_no_files_any_more_are_refused(tmp_path):
    """A pipe in data/tokens/images, at which training waited for ever."""
    for name, make in {"pipe": os.mkfifo, "zero": lambda path: path.symlink_to("/dev/zero")}.items():
        digest = hashlib.sha256(name.encode()).digest()
        path = image_file(tmp_path / IMAGES, digest)
        path.parent.mkdir(parents=True)
        make(path)
        with pytest.raises(UserError, match=f"{path}: is no regular file; delete {tmp_path} and run `dvc repro`"):
            ImageFiles(tmp_path).open(digest)


def test_rows_on_the_hub_name_no_files(rows: Path):
    """A stranger's row with the path of a file of this machine."""
    for path in ("images/a.png", str(rows / "a.png")):
        assert f"image {path} is named by a row on the hub" in refusal(path, None)
    assert read("images/a.png", None, b"in the row") == b"in the row"


def test_the_directory_is_that_of_the_row_s_file(rows: Path, tmp_path: Path, monkeypatch):
    """In a temporary experiment the rows are in a copy of the checkout, and ignored images only in the checkout."""
    write_rows(rows / "train.jsonl", [{}])
    [file] = data_files(lock_of(source(rows / "train.jsonl")))
    assert rows_directory(file) == rows
    copy = tmp_path / "copy"
    (copy / "rows").mkdir(parents=True)
    (copy / "rows/train.jsonl").write_bytes((rows / "train.jsonl").read_bytes())
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    monkeypatch.chdir(copy)
    entry = {**source(Path("rows/train.jsonl")), "source": "rows/train.jsonl"}
    [file] = data_files(lock_of(entry))
    assert file.path == Path("rows/train.jsonl")
    directory = rows_directory(file)
    assert directory is not None and directory.samefile(rows)
