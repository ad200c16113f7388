"""Pin the adapter that training goes on from (model.adapter): a local directory, or a repository of the hub."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lean_finetune.core.atomic_files import find_source, repo_root, sha256_file
from lean_finetune.core.errors import UserError
from lean_finetune.pinning.adapter_files import ADAPTER_WEIGHTS, read_adapter
from lean_finetune.pinning.config_file import ADAPTER_CONFIG
from lean_finetune.pinning.data_source import refuse_unignored
from lean_finetune.pinning.hub import HUB_ID, download, list_files
from lean_finetune.pinning.locate import NO_FILES, FileVersions, files_directory, model_directory, verify_files
from lean_finetune.pinning.watched_links import NOTHING_LOCAL

FILES = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
TUNED = Path("data/tuned")
"""Output of stage train, which DVC deletes before the stage runs."""


def pin_adapter(name: str, revision: str | None, model_lock: Mapping[str, Any]) -> tuple[dict[str, Any], Path]:
    """The entry of locks/model.json for an adapter, and what DVC watches.

    Raises UserError if it is missing, no LoRA adapter in safetensors, damaged, of another base, or cannot be reached.
    """
    directory = find_source(name)
    lock: dict[str, Any]
    if directory.is_dir():
        if revision is not None:
            raise UserError(
                f"model.adapter_revision: only an adapter on the hub has revisions; got {revision!r} with "
                f"model.adapter={name!r}; leave it blank"
            )
        if directory.resolve() in {(root / TUNED).resolve() for root in (Path(), repo_root())}:
            raise UserError(
                f"model.adapter: {name} is where training writes, and is deleted before; copy it to another directory, "
                "and name that"
            )
        refuse_unignored("model.adapter", name, (directory / file for file in FILES))
        lock, watched = {"kind": "directory", "name": name, "revision": None}, directory
    else:
        lock, watched = {"kind": "hub", "name": name, **_on_hub(name, revision)}, NOTHING_LOCAL
        directory = files_directory(lock, "model.adapter")
    adapter = read_adapter(directory)
    if lock["kind"] == "directory":
        lock["files"] = {file: sha256_file(directory / file) for file in FILES}
    refuse_other_base(directory, adapter, model_lock)
    return lock, watched


def find_adapter(name: str, revision: str | None) -> Path:
    """The directory of an adapter that is not pinned; of one on the hub, its files are downloaded.

    Raises UserError if there is none, or the hub cannot be reached.
    """
    directory = find_source(name)
    if directory.is_dir():
        return directory
    found = _on_hub(name, revision)
    return download("model.adapter", name, "model", found["revision"], list(found["files"]))


def _on_hub(name: str, revision: str | None) -> dict[str, Any]:
    """The commit of an adapter on the hub, and the hashes of its files."""
    if not HUB_ID.fullmatch(name):
        raise UserError(f"model.adapter: must be an existing directory, or a hub id org/name; got {name!r}; check it")
    commit, everything = list_files("model.adapter", name, "model", revision)
    if missing := [file for file in FILES if file not in everything]:
        pickles = [file for file in everything if file.endswith(".bin")]
        found = f" (only {pickles[0]}, a pickle, which can run code)" if pickles else ""
        raise UserError(f"model.adapter: {name} at {commit[:12]} has no {missing[0]}{found}; name a LoRA adapter")
    return {"revision": commit, "files": {file: everything[file][1] for file in FILES}}


def refuse_other_base(directory: Path, adapter: Mapping[str, Any], model_lock: Mapping[str, Any]) -> None:
    """Refuse an adapter of another model, as far as the name of its base tells.

    Two hub ids are compared, or the content of two directories. Shapes are compared when the model is built.

    Raises UserError naming both.
    """
    base, name = str(adapter["base_model_name_or_path"]), model_lock["name"]
    path = Path(base).expanduser()
    difference = None
    if model_lock["kind"] == "hub":
        if not path.is_dir() and HUB_ID.fullmatch(base) and base.lower() != name.lower():
            difference = f"of {base}"
    elif path.is_dir() and not path.samefile(model_directory(model_lock)):
        changed = (
            file
            for file, digest in model_lock["files"].items()
            if not (path / file).is_file() or sha256_file(path / file) != digest
        )
        if file := next(changed, None):
            difference = f"of {base}, whose {file} differs"
    if difference is not None:
        raise UserError(
            f"model.adapter: {directory} is {difference}; got model.name={name}; set model.name to the adapter's base, "
            f"or base_model_name_or_path in {ADAPTER_CONFIG} if both have the same weights"
        )


def verify_adapter(model_lock: Mapping[str, Any], directory: Path | None) -> FileVersions:
    """Compare the files of the pinned adapter with their hashes; none if there is no adapter.

    Raises ModelFault if a file is missing or changed.
    """
    if directory is None:
        return NO_FILES
    return verify_files(directory, model_lock["adapter"]["files"], "model.adapter")
