"""Find pinned files by their locks."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cuda_memory.terminal import echo
from cuda_memory.user_paths import user_path
from lean_finetune.config.field_types import HUB_PREFIX
from lean_finetune.core.atomic_files import file_digest, find_source, repo_root
from lean_finetune.core.errors import UserError
from lean_finetune.pinning.config_file import (
    ADAPTER_CONFIG,
    ADAPTER_FILES,
    CONFIG_FILE,
    FileKind,
    file_kind,
    glob_base,
    refuse_adapter,
)
from lean_finetune.pinning.hub import HUB_ID, NoAccess, cached_file, download, list_files
from lean_finetune.pinning.read_locks import check_data_lock

MAX_SOURCES = 8
"""Sources that a description names; the lock has all of them."""


def describe_model(lock: Mapping[str, Any]) -> str:
    """The model of locks/model.json, with its commit if it has one, and the adapter that training goes on from."""
    model, adapter = _with_commit(lock["name"], lock["revision"]), lock.get("adapter")
    return model if adapter is None else f"{model} with adapter {_with_commit(adapter['name'], adapter['revision'])}"


def describe_data(lock: Mapping[str, Any]) -> str:
    """The sources of locks/data.json, each with its commit if it has one."""
    sources = [
        _with_commit(one["source"], one["revision"]) + (" (held out)" if is_heldout_source(one) else "")
        for one in lock["sources"]
    ]
    more = len(sources) - MAX_SOURCES
    return ", ".join(sources[:MAX_SOURCES]) + (f" and {more} more" if more > 0 else "")


def is_heldout_source(source: Mapping[str, Any]) -> bool:
    """Whether a source of locks/data.json is from data.heldout_source, whose rows are never trained."""
    return bool(source.get("heldout"))


def _with_commit(name: str, revision: str | None) -> str:
    return f"{name} at {revision}" if revision else name


# Local paths of pinned files, and checks that they are unchanged. This module imports nothing slow.

TINY = "tiny"
TINY_DIRECTORY = Path(__file__).parents[1] / "tiny"
TINY_IN_CHECKOUT = Path("lean_finetune/tiny")
EXAMPLE_CONFIGS = Path(__file__).parents[1] / "example_configs"
"""A directory for each shipped config.json, such as llama-3.1-8b: a prediction needs no more of a model."""
CHAT_TEMPLATE = "chat_template.jinja"
"""File in which transformers looks for a chat template first."""
TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"
"""Beside it: the template of conversations with tools."""
# The files of a tokenizer, and of a multimodal model's processor. The first is required, the others are optional.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    CHAT_TEMPLATE,
    TOOL_TEMPLATE,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)
NAMED_TEMPLATES = ("tokenizer", "chatml")
"""Values of data.chat_template that are not the path of a file."""


class ModelFault(UserError):
    """A file of the pinned model is missing or changed. The remedy is that of the machine which pinned it."""

    def __init__(self, fault: str, remedy: str, parameter: str = "model.name"):
        super().__init__(f"{parameter}: {fault}; {remedy}")
        self.fault, self.parameter = fault, parameter


def template_file(chat_template: str) -> Path | None:
    """The file that data.chat_template names; None for a named template. Raises UserError if there is no such file."""
    if chat_template in NAMED_TEMPLATES:
        return None
    path = find_source(chat_template, "data.chat_template")
    if not path.is_file():
        raise UserError(
            f"data.chat_template: must be {' or '.join(NAMED_TEMPLATES)}, or the path of a template; no such file: "
            f"{chat_template!r}"
        )
    return path


def model_directory(lock: Mapping[str, Any]) -> Path:
    """The directory of the model pinned in locks/model.json, with config, weights and tokenizer.

    Raises ModelFault if one of its files is gone; UserError if it is on a hub that cannot be reached.
    """
    return _directory(lock, [*lock["files"], *lock["tokenizer_files"]])


def tokenizer_directory(lock: Mapping[str, Any]) -> Path:
    """Like `model_directory`, but of a hub model only the tokenizer's files are downloaded."""
    return _directory(lock, lock["tokenizer_files"])


def config_directory(lock: Mapping[str, Any]) -> Path:
    """Like `tokenizer_directory`, with config.json, whose hash is checked."""
    directory = _directory(lock, [CONFIG_FILE, *lock["tokenizer_files"]])
    verify_files(directory, {CONFIG_FILE: lock["files"][CONFIG_FILE]})
    return directory


def adapter_directory(model_lock: Mapping[str, Any]) -> Path | None:
    """The directory of the pinned adapter that training goes on from; None without one. Errors as `model_directory`."""
    lock = model_lock.get("adapter")
    return None if lock is None else files_directory(lock, "model.adapter")


def files_directory(lock: Mapping[str, Any], parameter: str) -> Path:
    """The directory of a lock with all of its files; errors name `parameter`."""
    return _directory(lock, list(lock["files"]), parameter)


def _directory(lock: Mapping[str, Any], paths: list[str], parameter: str = "model.name") -> Path:
    """The local directory of a lock, with at least `paths`."""
    if lock["kind"] == "hub":
        return download(parameter, lock["name"], "model", lock["revision"], paths)
    directory = TINY_DIRECTORY if lock["kind"] == TINY else find_source(lock["name"], parameter)
    remedy = "put it back or change the name"
    if not directory.is_dir():
        raise ModelFault(f"the pinned directory {lock['name']!r} is gone", remedy, parameter)
    if missing := [path for path in paths if not (directory / path).is_file()]:
        raise ModelFault(f"the pinned file {directory / missing[0]} is gone", remedy, parameter)
    return directory


def locked_files(lock: Mapping[str, Any]) -> dict[str, Any]:
    """The hashes of the files of a lock; those of the adapter in a model's lock are nested, under `adapter`."""
    return lock["files"] if lock.get("adapter") is None else {**lock["files"], "adapter": lock["adapter"]["files"]}


def model_address(lock: Mapping[str, Any]) -> str:
    """The name that loads the pinned model from any directory: its hub id, or its absolute path.

    In a temporary experiment it is the path in the user's checkout, which outlives the experiment's copy.
    """
    if lock["kind"] == "hub":
        return str(lock["name"])
    named, here = (TINY_IN_CHECKOUT, TINY_DIRECTORY) if lock["kind"] == TINY else (lock["name"], _directory(lock, []))
    there = repo_root() / named
    return os.path.abspath(there if there.is_dir() else here)


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """One file of the data lock."""

    source: int
    """Index of its source in the lock."""
    name: str
    """For messages: the path as the user writes it."""
    kind: FileKind
    size_bytes: int
    digest: str
    """Hex sha256 of its content, or git's blob sha1."""
    path: Path | None
    """Its local path; None if it is on the hub only."""
    repo_id: str = ""
    revision: str = ""
    path_in_repo: str = ""


def data_files(lock: Mapping[str, Any]) -> list[DataFile]:
    """The files of `locks/data.json` in reading order. Raises UserError if the lock is of another form."""
    located = []
    for number, source in enumerate(check_data_lock(lock)["sources"]):
        # The files' paths are relative to `base`, which is looked up once: in a temporary experiment that is slow.
        base = glob_base(source["source"]) if source["kind"] == "glob" else source["source"]
        root = Path() if source["kind"] == "hub" else find_source(base, "data.source")
        located += [_locate(number, source, file, base, root) for file in source["files"]]
    return located


def _locate(number: int, source: Mapping[str, Any], file: Mapping[str, Any], base: str, root: Path) -> DataFile:
    """Locate one file of a source. Its path is relative to `base`, as the user wrote it, which is at `root`."""
    given = source["source"]
    hub: dict[str, str] = {}
    path: Path | None
    if source["kind"] == "file":
        name, path = given, root
    elif source["kind"] == "hub":
        repo_id = given.removeprefix(HUB_PREFIX)
        name, path = f"{given}/{file['path']}", cached_file(repo_id, source["revision"], file["path"])
        hub = {"repo_id": repo_id, "revision": source["revision"], "path_in_repo": file["path"]}
    else:
        name, path = str(Path(base) / file["path"]), root / file["path"]
    kind = file_kind(file["path"])
    assert kind is not None, "pin_data pins no other"
    digest = file["sha256"] if "sha256" in file else file["blob_id"]
    return DataFile(source=number, name=name, kind=kind, size_bytes=file["bytes"], digest=digest, path=path, **hub)


def new_digest(pinned: str, size_bytes: int) -> "hashlib._Hash":
    """A hash object for the kind of `pinned`: sha256 of the content (64 hex digits) or git's blob sha1 (40)."""
    if len(pinned) == 64:
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % size_bytes, usedforsecurity=False)


def file_version(path: Path) -> tuple[int, ...]:
    """What changes with a file's content; empty if it is gone."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@dataclass(frozen=True)
class FileVersions:
    """The versions of files before they were read."""

    versions: Mapping[Path, tuple[int, ...]]

    def refuse_change(self, remedy: str = "run `dvc repro` again") -> None:
        """Raise ModelFault if a file changed since, so that what was read of it may be another one's."""
        for path, version in self.versions.items():
            if file_version(path) != version:
                raise ModelFault(f"{path} changed while it was read", remedy)


NO_FILES = FileVersions({})


def versions_in(directory: Path) -> FileVersions:
    """The versions of all entries of a directory; of none if there is no directory."""
    return FileVersions({path: file_version(path) for path in directory.glob("*")})


def verify_files(directory: Path, files: Mapping[str, str], parameter: str = "model.name") -> FileVersions:
    """Compare files with their pinned hashes, sha256 or git blob ids by name; the result is their versions.

    Raises ModelFault if a file is missing or changed.
    """
    versions = {}
    for name in sorted(files):
        path = directory / name
        versions[path] = file_version(path)
        try:
            digest = file_digest(path, new_digest(files[name], path.stat().st_size))
        except OSError as error:
            raise ModelFault(
                f"{path} cannot be read ({error.strerror})", "run `dvc repro` again to pin it again", parameter
            ) from error
        if digest != files[name]:
            raise ModelFault(f"{path} changed since it was pinned", "run `dvc repro` again", parameter)
    return FileVersions(versions)


def verify_adapter(model_lock: Mapping[str, Any], directory: Path | None) -> FileVersions:
    """Compare the files of the pinned adapter with their hashes; none if there is no adapter.

    Raises ModelFault if a file is missing or changed.
    """
    if directory is None:
        return NO_FILES
    return verify_files(directory, model_lock["adapter"]["files"], "model.adapter")


def example_names() -> list[str]:
    """The names of the shipped configurations."""
    return sorted(path.name for path in EXAMPLE_CONFIGS.iterdir())


def shipped_config(name: str) -> Path | None:
    """The directory of the shipped config.json of a model on the hub; None if the package has none.

    A model and the one that was tuned from it to follow instructions have the same sizes.
    """
    owner, _, model = name.lower().partition("/")
    known = model.removesuffix("-instruct")
    return EXAMPLE_CONFIGS / known if owner in ("meta-llama", "qwen") and known in example_names() else None


@cache
def _say_shipped(name: str) -> None:
    """Say once that a configuration is not the hub's."""
    echo(f"note: the hub gives no access to {name}; its config.json is the one in this package", err=True)


def find_model(name: str, revision: str | None = None) -> Path:
    """The directory of a model's config.json.

    `name` is a hub id, `tiny`, a shipped configuration, a directory, or the path of a config.json. Where the hub gives
    no access to a model whose config.json is in the package, that is taken.

    Raises:
        UserError: there is no such file, or the hub cannot be reached.
    """
    path = TINY_DIRECTORY if name == TINY else user_path(name, "model.name")
    directory = path.parent if path.name == CONFIG_FILE else path
    if (directory / CONFIG_FILE).is_file():
        return directory
    refuse_adapter(directory, name)
    if not path.exists() and name in example_names():
        return EXAMPLE_CONFIGS / name
    if path.exists() or not HUB_ID.fullmatch(name):
        is_missing = "" if path.exists() or os.sep not in name else ", which does not exist"
        raise UserError(
            f"model.name: must be a hub id org/name, a directory with {CONFIG_FILE}, the path of a file of that name, "
            f"or one of {', '.join(example_names())}; got {name!r}{is_missing}; a hub model's {CONFIG_FILE} alone is "
            "enough"
        )
    try:
        directory = download("model.name", name, "model", revision or "main", [CONFIG_FILE])
    except NoAccess:
        if revision is None and (shipped := shipped_config(name)) is not None:
            _say_shipped(name)
            return shipped
        raise
    if not (directory / CONFIG_FILE).is_file():
        refuse_adapter(download("model.name", name, "model", revision or "main", [ADAPTER_CONFIG]), name)
        raise UserError(f"model.name: {name} has no {CONFIG_FILE}; name a model that transformers saved")
    return directory


def find_tokenizer(name: str, revision: str | None = None) -> Path:
    """`find_model`, with the tokenizer's files; of a hub model they are downloaded.

    Raises:
        UserError: as `find_model`, or the model has no tokenizer.json.
    """
    directory = find_model(name, revision)
    if not (directory / "tokenizer.json").is_file() and HUB_ID.fullmatch(name) and not os.path.exists(name):
        directory = download("model.name", name, "model", revision or "main", [CONFIG_FILE, *TOKENIZER_FILES])
    if not (directory / "tokenizer.json").is_file():
        raise UserError(
            f"model.name: {name} has no tokenizer.json, which counts the tokens of rows; name a model with its "
            "tokenizer, or give --length or --lengths instead of rows"
        )
    return directory


def find_adapter(name: str, revision: str | None) -> Path:
    """The directory of an adapter that is not pinned; of one on the hub, its files are downloaded.

    Raises UserError if there is none, or the hub cannot be reached.
    """
    directory = find_source(name, "model.adapter")
    if directory.is_dir():
        return directory
    found = adapter_on_hub(name, revision)
    return download("model.adapter", name, "model", found["revision"], list(found["files"]))


def adapter_on_hub(name: str, revision: str | None) -> dict[str, Any]:
    """The commit of an adapter on the hub, and the hashes of its files."""
    if not HUB_ID.fullmatch(name):
        raise UserError(f"model.adapter: must be an existing directory, or a hub id org/name; got {name!r}; check it")
    commit, everything = list_files("model.adapter", name, "model", revision)
    if missing := [file for file in ADAPTER_FILES if file not in everything]:
        pickles = [file for file in everything if file.endswith(".bin")]
        found = f" (only {pickles[0]}, a pickle, which can run code)" if pickles else ""
        raise UserError(f"model.adapter: {name} at {commit[:12]} has no {missing[0]}{found}; name a LoRA adapter")
    return {"revision": commit, "files": {file: everything[file][1] for file in ADAPTER_FILES}}


def rows_directory(file: DataFile) -> Path | None:
    """The directory to which paths in a file's rows are relative; None for a file on the hub, which has none.

    A temporary experiment runs in a copy without what git ignores, such as files that rows
    name: they are in the user's checkout.
    """
    if file.path is None or file.repo_id:
        return None
    directory = Path(file.name).parent
    return file.path.parent if directory.is_absolute() else find_source(str(directory), "data.source")
