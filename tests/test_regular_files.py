"""Files that are read between stages: regular ones, and JSON that was not changed."""

import json
import os
import socket
from pathlib import Path

import pytest

from lean_finetune.core.atomic_files import read_json, read_sealed, sha256_file, write_json, write_sealed
from lean_finetune.core.errors import UserError
from lean_finetune.core.regular_files import NotRegular, open_regular, read_regular


def test_regular_files_and_links_to_them_are_read(tmp_path: Path):
    """DVC stores outputs as links into its cache."""
    (tmp_path / "a").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("a")
    assert read_regular(tmp_path / "link") == b"abc" and read_regular(tmp_path / "a", 2) == b"ab"
    with open_regular(tmp_path / "a") as file:
        assert file.read(1) == b"a" and file.read() == b"bc"
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "b")


@pytest.mark.parametrize("kind", ["pipe", "directory", "device", "socket"])
def test_others_are_refused_at_once(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch):
    """Hashing a pipe waits for its writer, and /dev/zero does not end."""
    monkeypatch.chdir(tmp_path)
    path = Path("a")
    opened = socket.socket(socket.AF_UNIX)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        opened.bind("a")
    is_directory = kind == "directory"
    for read in (read_regular, sha256_file, open_regular):
        with pytest.raises(IsADirectoryError if is_directory else NotRegular):
            read(path)
    says = r"cannot be read \(Is a directory\)" if is_directory else "is no regular file; remove it and run `dvc repro`"
    with pytest.raises(UserError, match=f"^a: {says}"):
        read_json(path)
    opened.close()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: text.replace("true", "false"), "differs from its hash: it was changed"),
        (lambda text: text.replace("0.5", "0.25"), "differs from its hash"),
        (lambda text: text.replace('"enforce"', '"enf0rce"'), "differs from its hash"),
        (lambda text: text.replace("sha256", "sha255"), "has no hash of its content, so no stage wrote it"),
        (lambda text: "[]", "has no hash of its content"),
        (lambda text: text[:9], "not JSON"),
    ],
)
def test_a_changed_value_in_json_is_refused(tmp_path: Path, change, says: str):
    """A run in another precision, with exit code 0."""
    path, value = tmp_path / "a.json", {"enforce": True, "share": 0.5, "name": "ü", "of": {"1": [None, 1e-300]}}
    write_sealed(path, value)
    assert read_sealed(path) == value
    path.write_text(change(path.read_text()))
    with pytest.raises(UserError, match=f"a.json.*: {says}.*run `dvc repro`"):
        read_sealed(path)


def test_the_order_of_keys_and_blanks_of_json_do_not_count(tmp_path: Path):
    write_sealed(tmp_path / "a.json", {"b": 1, "a": {"d": 2, "c": 3}})
    (tmp_path / "a.json").write_text(json.dumps(read_json(tmp_path / "a.json"), sort_keys=False, indent=None))
    assert read_sealed(tmp_path / "a.json") == {"b": 1, "a": {"d": 2, "c": 3}}
    write_json(tmp_path / "a.json", {"b": 1})
    with pytest.raises(UserError, match="has no hash"):
        read_sealed(tmp_path / "a.json")
