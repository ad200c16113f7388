"""Files of other kinds than their names say, as failed downloads and repositories of strangers have them."""

import gzip
import io
import json
import pickle
import shutil
import zipfile
from pathlib import Path

import pytest

from lean_finetune.commands.chat import chat
from lean_finetune.core.errors import UserError
from lean_finetune.pinning.adapter_files import read_adapter
from lean_finetune.pinning.locate import TINY_DIRECTORY
from stages.pin import main as pin
from tests.workspace import error, invoke, lay_out


def zipped() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as file:
        file.writestr("archive/data.pkl", b"")
    return stream.getvalue()


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
KINDS = {
    "a pointer": (POINTER, "it is a pointer of Git LFS: `git lfs pull` fetches the file"),
    "a web page": (b"\n<!DOCTYPE html>\n<html><body>Not found</body></html>", "it is a web page"),
    "a zip": (zipped(), "it is a zip file, as torch.save writes: a pickle, which can run code"),
    "a pickle": (pickle.dumps({"a": 1}), "it is a pickle, which can run code"),
    "a gzip": (gzip.compress(b"{}"), "it is a gzip file"),
    "a text": (b"hello\n", ""),
    "nothing": (b"", ""),
}
"""Content, and a part of the refusal."""
FILES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("model.safetensors", "model.safetensors.index.json", "chat_template.jinja"),
)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a model."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(TINY_DIRECTORY, tmp_path / "model")
    return lay_out(tmp_path, model__name="model")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FILES)
def test_a_file_of_a_model_is_named_with_what_it_is(name: str, kind: str, place: Path):
    """`header too large` for a pointer of Git LFS, or a web page as the template of every conversation."""
    content, says = KINDS[kind]
    (place / "model" / name).write_bytes(content)
    result = invoke(pin, "model")
    if name == "chat_template.jinja" and not says:  # Text, of which rows of plain text need none.
        refusal = error(invoke(chat, "--model", "model"))
        assert "chat_template.jinja is no chat template: it writes no message" in refusal
        return
    refusal = error(result)
    assert refusal.startswith("model.name: ") and name in refusal and says in refusal
    assert not Path("locks/model.json").exists()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_file_of_an_adapter_is_named_with_what_it_is(name: str, kind: str, place: Path):
    config = {"base_model_name_or_path": "org/base", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (place / "adapter_config.json").write_text(json.dumps(config))
    shutil.copy(TINY_DIRECTORY / "model.safetensors", place / "adapter_model.safetensors")
    content, says = KINDS[kind]
    (place / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_adapter(place)
    assert name in str(caught.value) and says in str(caught.value)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.txt", "rows.csv", "rows.parquet", "rows.jsonl.gz"])
def test_rows_that_are_a_pointer_are_refused(name: str, place: Path):
    """Three lines of Git LFS trained as text."""
    (place / name).write_bytes(POINTER)
    lay_out(place, data__source=name)
    assert f"{name} cannot be used ({KINDS['a pointer'][1]})" in error(invoke(pin, "data"))
