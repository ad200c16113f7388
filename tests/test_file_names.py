"""Names that files list: none leads out of the directory that it belongs to."""

import json
from pathlib import Path

import pytest

from lean_finetune.core.errors import UserError
from lean_finetune.core.file_names import is_name_inside
from lean_finetune.pinning.data_source import pin_local
from lean_finetune.pinning.model_files import INDEX, shard_names
from lean_finetune.pinning.read_locks import read_data_lock, read_model_lock, read_tokenizer_lock
from tests.conftest import ROOT

OUTSIDE = ("../a", "a/../../b", "..", "/etc/hosts", "", ".", "a//b", "./a", "a/", "a\0", "\ud800", "a" * 256, 5, None)


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_name_that_leads_elsewhere_is_none(name: object):
    assert not is_name_inside(name)


@pytest.mark.parametrize("name", ["a", "a/b.arrow", "..a", "a..b/ü", "a b", "a" * 255])
def test_a_name_of_a_file_in_the_directory_is_one(name: str):
    assert is_name_inside(name)


def changed(lock: str, change, to: Path) -> Path:
    """A copy of this repository's lock with a change."""
    content = json.loads((ROOT / "locks" / lock).read_text())
    change(content)
    (to / lock).write_text(json.dumps(content))
    return to / lock


OTHER_FILE = "../../victim.json"


@pytest.mark.parametrize(
    ("lock", "read", "change"),
    [
        ("model.json", read_model_lock, lambda lock: lock["files"].update({OTHER_FILE: "0"})),
        ("model.json", read_model_lock, lambda lock: lock["tokenizer_files"].append(OTHER_FILE)),
        (
            "model.json",
            read_model_lock,
            lambda lock: lock.update(
                adapter={"kind": "directory", "name": "a", "revision": None, "files": {OTHER_FILE: "0"}}
            ),
        ),
        ("tokenizer.json", read_tokenizer_lock, lambda lock: lock["files"].update({OTHER_FILE: "0"})),
        ("data.json", read_data_lock, lambda lock: lock["sources"][0]["files"][0].update(path=OTHER_FILE)),
    ],
)
def test_a_lock_names_only_files_of_its_directory(lock: str, read, change, tmp_path: Path):
    """Train copied the files of locks/tokenizer.json: a name with `..` was read and written outside of the project."""
    assert read(ROOT / "locks" / lock) == json.loads((ROOT / "locks" / lock).read_text())
    with pytest.raises(
        UserError, match=rf"{lock}: is not as pin_.* \(.*must be the relative path.*run `dvc repro pin_"
    ):
        read(changed(lock, change, tmp_path))


@pytest.mark.parametrize("lock, read", [("model.json", read_model_lock), ("tokenizer.json", read_tokenizer_lock)])
@pytest.mark.parametrize("content", ["[]", "{}", '{"files": [], "name": 1}', "1"])
def test_a_lock_of_another_form_is_one_line(lock: str, read, content: str, tmp_path: Path):
    """A traceback with KeyError or TypeError."""
    (tmp_path / lock).write_text(content)
    with pytest.raises(UserError, match=rf"{lock}: is not as pin_model of this version writes it"):
        read(tmp_path / lock)


@pytest.mark.parametrize("name", ["../model.safetensors", "/model.safetensors", f"{'a' * 300}.safetensors", 5, None])
def test_an_index_names_only_files_beside_it(name: object, tmp_path: Path):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(UserError, match=r"model.safetensors.index.json names .*; shards must be .safetensors files"):
        shard_names(tmp_path)


def test_a_saved_data_set_names_only_its_own_files(tmp_path: Path):
    """A split named `..` was another directory's."""
    (tmp_path / "set").mkdir()
    (tmp_path / "set/dataset_dict.json").write_text('{"splits": ["train", ".."]}')
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "a.arrow"}]}')
    (tmp_path / "a.arrow").write_text("rows")
    with pytest.raises(UserError, match=r"data.split: .* has no split '\.\.'"):
        pin_local("data.source", str(tmp_path / "set"), "..", None)
    (tmp_path / "set/dataset_dict.json").unlink()
    for name in ("../a.arrow", f"{'a' * 300}.arrow"):
        (tmp_path / "set/state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
        with pytest.raises(UserError, match=r"state.json names .*, not an .arrow file there"):
            pin_local("data.source", str(tmp_path / "set"), None, None)
