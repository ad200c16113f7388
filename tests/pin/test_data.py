"""pin data: what later stages read is named by content, and a bad source is refused in one line."""

import hashlib
import json
import os
import subprocess
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from stages.errors import UserError
from stages.files import read_json
from stages.pin.__main__ import main
from stages.pin.data import OUTPUTS
from stages.pin.locate import data_files
from tests.workspace import invoke, lay_out, told, write_rows

ROWS = [{"text": "one"}, {"text": "two"}]
LINK = Path("locks/watched-data")


@pytest.fixture
def pin(tmp_path, monkeypatch):
    """A workspace's directory, and a function that sets data values and pins."""
    directory = tmp_path / "checkout"
    directory.mkdir()
    monkeypatch.chdir(directory)
    monkeypatch.delenv("DVC_STAGE", raising=False)
    monkeypatch.delenv("DVC_ROOT", raising=False)

    def run(source, revision=None):
        lay_out(directory, data__source=str(source), data__revision=revision)
        return invoke(main, "data")

    return run


def test_a_file_is_pinned_by_content_and_watched_by_a_relative_link(pin):
    source = write_rows(Path("data/mine.jsonl"), ROWS)
    assert pin(source).exit_code == 0
    content = source.read_bytes()
    assert read_json(Path("locks/data.json")) == {
        "kind": "file",
        "source": "data/mine.jsonl",
        "revision": None,
        "bytes": len(content),
        "files": [{"path": "mine.jsonl", "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}],
    }
    assert os.readlink(LINK) == "../data/mine.jsonl"


def test_an_edited_file_changes_the_lock_and_pinning_twice_changes_nothing(pin):
    """A lock that varied between runs would rerun the whole pipeline for nothing."""
    source = write_rows(Path("mine.jsonl"), ROWS)
    pin(source)
    first, link = Path("locks/data.json").read_bytes(), LINK.lstat().st_mtime_ns
    pin(source)
    assert (Path("locks/data.json").read_bytes(), LINK.lstat().st_mtime_ns) == (first, link)
    write_rows(source, [*ROWS, {"text": "three"}])
    pin(source)
    assert Path("locks/data.json").read_bytes() != first


def test_a_directory_is_pinned_file_by_file_in_order_without_hidden_and_foreign_files(pin, tmp_path):
    folder = tmp_path / "elsewhere"
    for name in ("b.jsonl", "a/z.json", ".hidden.jsonl", ".cache/x.jsonl", "README.md"):
        write_rows(folder / name, ROWS)
    assert pin(folder).exit_code == 0
    lock = read_json(Path("locks/data.json"))
    assert lock["kind"] == "directory"
    assert [file["path"] for file in lock["files"]] == ["a/z.json", "b.jsonl"]
    assert [path for _, path, _ in data_files(lock)] == [folder / "a/z.json", folder / "b.jsonl"]
    assert os.readlink(LINK) == str(folder)


def test_an_untracked_file_is_linked_absolutely_once_git_keeps_the_checkout(pin):
    """A relative link to it would dangle in the copy that temporary and queued experiments run in."""
    source = write_rows(Path("data/mine.jsonl"), ROWS)
    subprocess.run(["git", "init", "-q"], check=True)
    pin(source)
    assert os.readlink(LINK) == str(source.resolve())
    subprocess.run(["git", "add", "data/mine.jsonl"], check=True)
    pin(source)
    assert os.readlink(LINK) == "../data/mine.jsonl"


def test_a_link_in_the_source_is_watched_itself(pin, tmp_path):
    """Were the file behind it watched, a link that is repointed to another version would never be noticed."""
    first, second = (write_rows(tmp_path / f"{name}.jsonl", ROWS) for name in ("v1", "v2"))
    Path("latest.jsonl").symlink_to(first)
    pin(Path.cwd() / "latest.jsonl")
    assert LINK.resolve() == first
    Path("latest.jsonl").unlink()
    Path("latest.jsonl").symlink_to(second)
    assert LINK.resolve() == second
    subprocess.run(["git", "init", "-q"], check=True)
    pin("latest.jsonl")
    assert os.readlink(LINK) == str(Path.cwd() / "latest.jsonl")
    subprocess.run(["git", "add", "latest.jsonl"], check=True)
    pin("latest.jsonl")
    assert os.readlink(LINK) == "../latest.jsonl"


def test_a_source_behind_an_untracked_linked_folder_is_linked_absolutely(pin, tmp_path):
    """Git lists no path behind a link, so asking it about the file alone would call the file tracked."""
    write_rows(tmp_path / "store/rows.jsonl", ROWS)
    Path("store").symlink_to(tmp_path / "store")
    subprocess.run(["git", "init", "-q"], check=True)
    pin("store/rows.jsonl")
    assert os.readlink(LINK) == str(Path.cwd() / "store/rows.jsonl")


def test_a_relative_source_is_found_in_the_users_checkout_from_a_copy(pin, tmp_path, monkeypatch):
    """Queued experiments run in a copy of the repository that lacks untracked data."""
    copy = tmp_path / "copy"
    copy.mkdir()
    source = write_rows(Path("mine.jsonl"), ROWS).resolve()
    lay_out(copy, data__source="mine.jsonl")
    monkeypatch.setenv("DVC_ROOT", str(Path.cwd()))
    monkeypatch.chdir(copy)
    assert invoke(main, "data").exit_code == 0
    assert os.readlink(copy / LINK) == str(source)
    assert read_json(copy / "locks/data.json")["source"] == "mine.jsonl"


BAD_SOURCES = {
    "missing": ("missing.jsonl", "data.source: no such file or directory; got 'missing.jsonl'"),
    "empty": ("empty.jsonl", "data.source: empty.jsonl is empty"),
    "other format": ("rows.parquet", "data.source: a file must be .jsonl or .json; got 'rows.parquet'"),
    "empty folder": ("folder", "data.source: the directory holds no .jsonl or .json file; got 'folder'"),
    "home": ("~/rows.jsonl", "data.source: ~ is not expanded; got '~/rows.jsonl'; write the whole path"),
    "half a hub id": ("hf://only-a-name", "data.source: a hub data set is hf://org/name; got 'hf://only-a-name'"),
}


@pytest.mark.parametrize("source, rule", BAD_SOURCES.values(), ids=BAD_SOURCES)
def test_a_bad_source_is_refused_and_leaves_the_last_pin_whole(pin, source, rule):
    Path("folder").mkdir()
    Path("empty.jsonl").touch()
    Path("rows.parquet").write_bytes(b"PAR1")
    pin(write_rows(Path("good.jsonl"), ROWS))
    before = Path("locks/data.json").read_bytes(), os.readlink(LINK)
    assert told(pin(source)).startswith(rule)
    assert (Path("locks/data.json").read_bytes(), os.readlink(LINK)) == before
    assert sorted(path.name for path in Path("locks").iterdir()) == ["data.json", "watched-data"]


@pytest.mark.parametrize("source", ["data", ".", "data/tokens", "data/report/rows", "alias", "locks"])
def test_a_source_that_the_pipeline_writes_into_is_refused(pin, source):
    """Every run would change its own input."""
    write_rows(Path("data/raw/rows.jsonl"), ROWS)
    write_rows(Path("data/report/rows/rows.jsonl"), ROWS)
    write_rows(Path("data/tokens/rows.jsonl"), ROWS)
    Path("alias").symlink_to("data")
    pin("data/raw")
    assert told(pin(source)).startswith("data.source: must not hold, or lie in, ")
    assert read_json(Path("locks/data.json"))["source"] == "data/raw"


def test_every_output_of_the_pipeline_is_refused_as_a_source(repo_root):
    """The list in the code must keep up with dvc.yaml."""
    with open(repo_root / "dvc.yaml") as file:
        stages = YAML(typ="safe").load(file)["stages"].values()
    written = [out for stage in stages for out in (*stage.get("outs", []), *stage.get("metrics", []))]
    paths = {Path(out if isinstance(out, str) else next(iter(out))) for out in written}
    covered = {Path(output) for output in OUTPUTS}
    assert {path if path in covered else path.parent for path in paths} == covered


def test_a_link_in_a_directory_that_would_be_skipped_is_refused(pin, tmp_path):
    """Rows behind it would be missing without a word; a link to a file is read."""
    folder, more = tmp_path / "folder", tmp_path / "more"
    rows, _ = write_rows(folder / "rows.jsonl", ROWS), write_rows(more / "rows.jsonl", ROWS)
    (folder / "linked.jsonl").symlink_to(rows)
    (folder / ".#lock").symlink_to("nobody@nowhere")
    assert pin(folder).exit_code == 0
    assert [file["path"] for file in read_json(Path("locks/data.json"))["files"]] == ["linked.jsonl", "rows.jsonl"]
    (folder / "more").symlink_to(more)
    assert told(pin(folder)).startswith(f"data.source: {folder}/more is a link to a directory, which is not followed")
    (folder / "more").unlink()
    (folder / "gone.jsonl").symlink_to("nowhere.jsonl")
    assert told(pin(folder)).startswith(f"data.source: {folder}/gone.jsonl is a link to nowhere.jsonl, which does not")


def test_a_revision_of_a_local_source_is_refused(pin):
    """It would be ignored in silence."""
    source = write_rows(Path("mine.jsonl"), ROWS)
    assert told(pin(source, revision="main")).startswith("data.revision: only a hub source")


def test_data_files_name_places_as_the_user_wrote_them(pin):
    """Faults in rows are told as file:line, which has to be a path the user knows."""
    pin(write_rows(Path("data/mine.jsonl"), ROWS))
    assert [name for name, _, _ in data_files(json.loads(Path("locks/data.json").read_text()))] == ["data/mine.jsonl"]


def test_a_lock_that_is_missing_is_told():
    with pytest.raises(UserError, match="file is missing; run `dvc repro`"):
        read_json(Path("no/such/lock.json"))
