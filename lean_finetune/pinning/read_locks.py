"""Read the locks of stage pin: a project that others made may have them, so names of files are checked."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictInt, ValidationError

from lean_finetune.core.atomic_files import read_json
from lean_finetune.core.errors import UserError, shortened
from lean_finetune.core.file_names import is_name_inside

DATA_SCHEMA = 2


def _inside(name: str) -> str:
    if not is_name_inside(name):
        raise ValueError("must be the relative path of a file, without '..'")
    return name


Name = Annotated[str, AfterValidator(_inside)]


class _Lock(BaseModel):
    model_config = ConfigDict(extra="ignore")


class _AdapterLock(_Lock):
    kind: Literal["hub", "directory"]
    name: str
    revision: str | None
    files: dict[Name, str]


class _ModelLock(_Lock):
    kind: Literal["hub", "directory", "tiny"]
    name: str
    revision: str | None
    files: dict[Name, str]
    tokenizer_files: list[Name]
    trained_tokens: list[StrictInt] = []
    adapter: _AdapterLock | None = None


class _TokenizerLock(_Lock):
    files: dict[Name, str]
    stop_ids: list[StrictInt]
    vision_patch: list[StrictInt] | None = None


class _DataFile(_Lock):
    path: Name
    size_bytes: StrictInt = Field(alias="bytes", ge=0)
    sha256: str | None = None
    blob_id: str | None = None


class _Source(_Lock):
    source: str
    kind: Literal["file", "glob", "directory", "saved", "hub"]
    revision: str | None
    files: list[_DataFile]


class _DataLock(_Lock):
    version: Literal[2] = Field(alias="schema")
    sources: list[_Source]
    chat_template_sha256: str | None = None


def read_model_lock(path: Path) -> dict[str, Any]:
    """The content of locks/model.json. Raises UserError if it is not as stage pin_model writes it."""
    return _checked(path, _ModelLock, "pin_model")


def read_tokenizer_lock(path: Path) -> dict[str, Any]:
    """The content of locks/tokenizer.json. Raises UserError if it is not as stage pin_model writes it."""
    return _checked(path, _TokenizerLock, "pin_model")


def read_data_lock(path: Path) -> dict[str, Any]:
    """The content of locks/data.json. Raises UserError if it is not as stage pin_data writes it."""
    return check_data_lock(read_json(path), path)


def check_data_lock(lock: Mapping[str, Any], path: Path = Path("locks/data.json")) -> dict[str, Any]:
    """The content of locks/data.json, unchanged. Raises UserError if it is not as stage pin_data writes it."""
    return _check(lock, path, _DataLock, "pin_data")


def _checked(path: Path, form: type[_Lock], stage: str) -> dict[str, Any]:
    return _check(read_json(path), path, form, stage)


def _check(lock: Any, path: Path, form: type[_Lock], stage: str) -> dict[str, Any]:
    try:
        form.model_validate(lock)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        what = first["msg"].removeprefix("Value error, ")
        got = "" if first["type"] == "missing" else f"; got {shortened(repr(first['input']))}"
        fault = f"{where}: {what}{got}" if where else what
        raise UserError(
            f"{path}: is not as {stage} of this version writes it ({fault}); run `dvc repro {stage}`"
        ) from None
    return dict(lock)
