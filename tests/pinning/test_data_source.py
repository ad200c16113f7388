"""Pinning of data: files are pinned by content, and a source that cannot be read is refused in one line."""

import hashlib
import json
import os
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict
from ruamel.yaml import YAML

from lean_finetune.core.atomic_files import read_json
from lean_finetune.pinning.locate import data_files
from lean_finetune.pinning.watched_links import OUTPUTS
from stages.pin import main
from tests.processes import run_bounded
from tests.workspace import error, invoke, lay_out, write_rows

ROWS = [{"text": "one"}, {"text": "two"}]
LINK = Path("locks/watched-data")


def pinned(key: str) -> list:
    """One value of every source in the lock; of files their paths."""
    sources = read_json(Path("locks/data.json"))["sources"]
    return [[file["path"] for file in one[key]] if key == "files" else one[key] for one in sources]


def test_a_file_is_pinned_by_content_and_watched_by_a_relative_link(pin):
    source = write_rows(Path("data/mine.jsonl"), ROWS)
    assert pin(source).exit_code == 0
    content = source.read_bytes()
    unset = dict.fromkeys(("revision", "config", "split", "format", "columns", "rows"))
    files = [{"path": "mine.jsonl", "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}]
    assert read_json(Path("locks/data.json")) == {
        "schema": 2,
        "bytes": len(content),
        "sources": [{"source": "data/mine.jsonl", "kind": "file", "files": files, **unset}],
        "chat_template_sha256": None,
    }
    assert os.readlink(LINK) == "../data/mine.jsonl"


def test_an_edited_file_changes_the_lock_and_pinning_twice_changes_nothing(pin):
    """A lock that varied between runs would rerun the pipeline for nothing."""
    source = write_rows(Path("mine.jsonl"), ROWS)
    pin(source)
    first, link = Path("locks/data.json").read_bytes(), LINK.lstat().st_mtime_ns
    pin(source)
    assert (Path("locks/data.json").read_bytes(), LINK.lstat().st_mtime_ns) == (first, link)
    write_rows(source, [*ROWS, {"text": "three"}])
    pin(source)
    assert Path("locks/data.json").read_bytes() != first


def test_a_directory_is_pinned_in_order_without_hidden_files_and_documentation(pin, tmp_path):
    folder = tmp_path / "elsewhere"
    for name in ("b.jsonl", "a/z.json", ".hidden.jsonl", ".cache/x.jsonl", "README.md"):
        write_rows(folder / name, ROWS)
    assert pin(folder).exit_code == 0
    assert (pinned("kind"), pinned("files")) == (["directory"], [["a/z.json", "b.jsonl"]])
    located = data_files(read_json(Path("locks/data.json")))
    assert [file.path for file in located] == [folder / "a/z.json", folder / "b.jsonl"]
    assert os.readlink(LINK) == str(folder)


def test_a_file_that_git_ignores_is_linked_absolutely(pin):
    """A relative link to it would dangle in the copy that temporary and queued experiments run in."""
    source = write_rows(Path("data/mine.jsonl"), ROWS)
    run_bounded(["git", "init", "-q"], check=True)
    assert "/data/ to .git/info/exclude" in error(pin(source))
    Path("dvc.yaml").write_text("stages: {}\n")  # Of a project that was not added to git yet.
    assert "git does not track this project yet" in error(pin(source)) and "`git add`" in error(pin(source))
    Path("dvc.yaml").unlink()
    Path(".git/info/exclude").write_text("/data/mine.jsonl\n")
    pin(source)
    assert os.readlink(LINK) == str(source.resolve())
    run_bounded(["git", "add", "-f", "data/mine.jsonl"], check=True)
    pin(source)
    assert os.readlink(LINK) == "../data/mine.jsonl"


def test_a_link_in_the_source_is_watched_and_not_its_target(pin, tmp_path):
    """Otherwise DVC would not notice that the link now points to another version."""
    first, second = (write_rows(tmp_path / f"{name}.jsonl", ROWS) for name in ("v1", "v2"))
    Path("latest.jsonl").symlink_to(first)
    pin(Path.cwd() / "latest.jsonl")
    assert LINK.resolve() == first
    Path("latest.jsonl").unlink()
    Path("latest.jsonl").symlink_to(second)
    assert LINK.resolve() == second
    run_bounded(["git", "init", "-q"], check=True)
    pin("latest.jsonl")
    assert os.readlink(LINK) == str(Path.cwd() / "latest.jsonl")
    run_bounded(["git", "add", "latest.jsonl"], check=True)
    pin("latest.jsonl")
    assert os.readlink(LINK) == "../latest.jsonl"


def test_a_source_behind_an_untracked_linked_folder_is_linked_absolutely(pin, tmp_path):
    """Git lists no path behind a link, so the file alone would look tracked."""
    write_rows(tmp_path / "store/rows.jsonl", ROWS)
    Path("store").symlink_to(tmp_path / "store")
    run_bounded(["git", "init", "-q"], check=True)
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
    assert read_json(copy / "locks/data.json")["sources"][0]["source"] == "mine.jsonl"


BAD_SOURCES = {
    "address": ("https://example.org/rows.jsonl?x=1", "data.source: URLs are not fetched, except data sets of the"),
    "missing": ("missing.jsonl", "data.source: no such file or directory; got 'missing.jsonl'"),
    "empty": ("empty.jsonl", "data.source: empty.jsonl is empty"),
    "other format": ("rows.xlsx", "data.source: a file must be .jsonl, .ndjson, .json, .csv, .tsv, .parquet, "),
    "empty folder": ("folder", "data.source: the directory has no data file (.jsonl, "),
    "folder with more": ("mixed", "data.source: the directory has rows.xlsx, which is of no known kind ("),
    "glob of nothing": ("*.csv", "data.source: DVC would watch all of "),
    "glob of nothing below": ("folder/**/*.csv", "data.source: the glob matches no data file (.jsonl, "),
    "glob in nowhere": ("none/*.csv", "data.source: no such directory 'none'; got 'none/*.csv'; correct the glob"),
    "glob of more": ("mixed/*", "data.source: 'mixed/*' has rows.xlsx, which is of no known kind ("),
    "home": ("~/rows.jsonl", "data.source: ~ is not expanded; got '~/rows.jsonl'; write the full path"),
    "half a hub id": ("hf://only-a-name", "data.source: a hub data set is hf://org/name; got 'hf://only-a-name'"),
}


@pytest.mark.parametrize("source, rule", BAD_SOURCES.values(), ids=BAD_SOURCES)
def test_a_bad_source_is_refused_and_the_last_lock_stays(pin, source, rule):
    Path("folder").mkdir()
    Path("empty.jsonl").touch()
    Path("rows.xlsx").write_bytes(b"PK")
    write_rows(Path("mixed/rows.jsonl"), ROWS)
    Path("mixed/rows.xlsx").write_bytes(b"PK")
    pin(write_rows(Path("good.jsonl"), ROWS))
    before = Path("locks/data.json").read_bytes(), os.readlink(LINK)
    assert error(pin(source)).startswith(rule)
    assert (Path("locks/data.json").read_bytes(), os.readlink(LINK)) == before
    links = ["watched-data", "watched-data-1", "watched-data-2", "watched-data-3", "watched-files"]
    assert sorted(path.name for path in Path("locks").iterdir()) == ["data.json", *links]


@pytest.mark.parametrize("source", ["data", ".", "data/tokens", "data/report/rows", "alias", "locks"])
def test_an_output_of_the_pipeline_is_refused_as_a_source(pin, source):
    """Every run would change its own input."""
    write_rows(Path("data/raw/rows.jsonl"), ROWS)
    write_rows(Path("data/report/rows/rows.jsonl"), ROWS)
    write_rows(Path("data/tokens/rows.jsonl"), ROWS)
    Path("alias").symlink_to("data")
    pin("data/raw")
    says = ("data.source: must not be in ", "data.source: DVC would watch all of ")
    assert error(pin(source)).startswith(says)
    assert pinned("source") == ["data/raw"]


def test_the_list_of_outputs_is_that_of_dvc_yaml(repo_root):
    with open(repo_root / "dvc.yaml") as file:
        stages = YAML(typ="safe").load(file)["stages"].values()
    written = [out for stage in stages for out in (*stage.get("outs", []), *stage.get("metrics", []))]
    paths = {Path(out if isinstance(out, str) else next(iter(out))) for out in written}
    covered = {Path(output) for output in OUTPUTS}
    assert {path if path in covered else path.parent for path in paths} == covered


def test_a_link_in_a_directory_that_would_be_skipped_is_refused(pin, tmp_path):
    """Its rows would be silently missing. A link to a file is read."""
    folder, more = tmp_path / "folder", tmp_path / "more"
    rows, _ = write_rows(folder / "rows.jsonl", ROWS), write_rows(more / "rows.jsonl", ROWS)
    (folder / "linked.jsonl").symlink_to(rows)
    (folder / ".#lock").symlink_to("nobody@nowhere")
    assert pin(folder).exit_code == 0
    assert pinned("files") == [["linked.jsonl", "rows.jsonl"]]
    (folder / "more").symlink_to(more)
    assert error(pin(folder)).startswith(f"data.source: {folder}/more is a link to a directory, which is not followed")
    (folder / "more").unlink()
    (folder / "gone.jsonl").symlink_to("nowhere.jsonl")
    assert error(pin(folder)).startswith(f"data.source: {folder}/gone.jsonl is a link to nowhere.jsonl, which does not")


def save(path: Path, rows: list[dict], **options) -> None:
    Dataset.from_list(rows).save_to_disk(path, **options)


def test_a_saved_data_set_is_pinned_in_the_order_of_its_state(pin, tmp_path):
    """By name, the eleventh file would come before the second."""
    save(tmp_path / "saved", [{"text": str(k)} for k in range(24)], num_shards=12)
    assert pin(tmp_path / "saved").exit_code == 0
    state = json.loads((tmp_path / "saved/state.json").read_text())
    assert pinned("files") == [[file["filename"] for file in state["_data_files"]]]
    assert (pinned("kind"), pinned("split")) == (["saved"], [None])
    assert error(pin(tmp_path / "saved", split="train")).startswith("data.split: only hub data sets and saved Dataset")


def test_a_split_of_a_saved_dict_is_chosen(pin, tmp_path):
    both = DatasetDict({"train": Dataset.from_list(ROWS), "test": Dataset.from_list(ROWS[:1])})
    both.save_to_disk(tmp_path / "saved")
    assert pin(tmp_path / "saved").exit_code == 0
    assert (pinned("split"), pinned("files")) == (["train"], [["train/data-00000-of-00001.arrow"]])
    assert pin(tmp_path / "saved", split="test").exit_code == 0
    assert (pinned("split"), pinned("files")) == (["test"], [["test/data-00000-of-00001.arrow"]])
    rule = f"data.split: {str(tmp_path / 'saved')!r} has no split 'dev'; name one of train, test"
    assert error(pin(tmp_path / "saved", split="dev")) == rule


def test_a_saved_data_set_that_names_files_elsewhere_is_refused(pin, tmp_path):
    save(tmp_path / "saved", ROWS)
    state = tmp_path / "saved/state.json"
    state.write_text(json.dumps({"_data_files": [{"filename": "../../secret.arrow"}]}))
    assert "names '../../secret.arrow', not an .arrow file there" in error(pin(tmp_path / "saved"))
    state.write_text("{")
    assert "state.json is not JSON" in error(pin(tmp_path / "saved"))


def test_a_glob_is_pinned_in_order_and_its_directory_watched(pin):
    for name in ("raw/b/2.jsonl", "raw/a/1.csv", "raw/a/notes.md", "raw/.x/3.jsonl", "raw/4.jsonl"):
        write_rows(Path(name), ROWS)
    assert pin("raw/**/*.*").exit_code == 0
    assert pinned("files") == [["4.jsonl", "a/1.csv", "b/2.jsonl"]]
    assert os.readlink(LINK) == "../raw"
    assert [file.name for file in data_files(read_json(Path("locks/data.json")))][1] == "raw/a/1.csv"
    assert pin("raw/*/*.jsonl").exit_code == 0
    assert pinned("files") == [["b/2.jsonl"]]
    write_rows(Path("raw/[1].jsonl"), ROWS)
    assert pin("raw/[1].jsonl").exit_code == 0
    assert pinned("kind") == ["file"], "a name with brackets is that file where there is one"


def test_several_sources_are_pinned_in_order_and_each_is_watched(pin, tmp_path):
    one, two = (write_rows(tmp_path / f"{name}.jsonl", ROWS) for name in ("one", "two"))
    write_rows(tmp_path / "folder/rows.jsonl", ROWS)
    entries: list[dict] = [
        {"source": str(one), "weight": 0.5, "columns": {"text": "body"}},
        {"source": str(tmp_path / "folder"), "rows": 1},
        {"source": str(two), "format": "text"},
    ]
    assert pin(entries).exit_code == 0
    assert pinned("files") == [["one.jsonl"], ["rows.jsonl"], ["two.jsonl"]]
    assert (pinned("rows"), pinned("format")) == ([None, 1, None], [None, None, "text"])
    assert pinned("columns") == [{"text": "body"}, None, None]
    assert [os.readlink(f"locks/watched-files/{k}") for k in (0, 1)] == [str(one), str(two)]
    assert os.readlink(LINK) == str(tmp_path / "folder")
    before = Path("locks/data.json").read_bytes()
    assert pin([{**entries[0], "weight": 2.0}, *entries[1:]]).exit_code == 0
    assert Path("locks/data.json").read_bytes() == before, "a weight must not tokenize again"
    assert pin(one).exit_code == 0
    assert [path.name for path in Path("locks/watched-files").iterdir()] == ["0"]
    assert os.readlink("locks/watched-files/0") == "../README.md"


def test_faults_in_a_list_name_the_entry(pin, tmp_path):
    good = {"source": str(write_rows(tmp_path / "one.jsonl", ROWS))}
    assert error(pin([good, {"source": "none.jsonl"}])).startswith("data.source.1.source: no such file or directory")
    assert error(pin([good, {**good, "split": "test"}])).startswith("data.source.1.split: only hub data sets and saved")
    assert error(pin([good, good], split="test")).startswith("data.split: only hub data sets and saved DatasetDicts")


def test_any_number_of_directories_is_watched(pin, tmp_path):
    """Further directories have a link for each file, and a note names what DVC does not notice."""
    for k in range(6):
        write_rows(tmp_path / f"{k}/rows.jsonl", ROWS)
    result = pin([{"source": str(tmp_path / f"{k}")} for k in range(6)])
    assert result.exit_code == 0 and len(pinned("files")) == 6
    assert f"added ones in the first 4 alone; after adding files to {tmp_path / '4'}" in result.stderr
    links = {path.name: os.readlink(path) for path in Path("locks").rglob("*") if path.is_symlink()}
    assert [links[name] for name in ("watched-data", "watched-data-3")] == [str(tmp_path / k) for k in ("0", "3")]
    assert [links[name] for name in ("0", "1")] == [str(tmp_path / k / "rows.jsonl") for k in ("4", "5")]
    assert pin([{"source": str(tmp_path / f"{k}")} for k in range(4)]).stderr == ""
