"""Pin the adapter that training goes on from (model.adapter): a local directory, or a repository of the hub."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lean_finetune.core.atomic_files import find_source, repo_root, sha256_file
from lean_finetune.core.errors import UserError
from lean_finetune.pinning.adapter_files import read_adapter
from lean_finetune.pinning.config_file import ADAPTER_CONFIG, ADAPTER_FILES
from lean_finetune.pinning.data_source import refuse_unignored
from lean_finetune.pinning.hub import HUB_ID
from lean_finetune.pinning.locate import adapter_on_hub, files_directory, model_directory
from lean_finetune.pinning.watched_links import NOTHING_LOCAL

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
        refuse_unignored("model.adapter", name, (directory / file for file in ADAPTER_FILES))
        lock, watched = {"kind": "directory", "name": name, "revision": None}, directory
    else:
        lock, watched = {"kind": "hub", "name": name, **adapter_on_hub(name, revision)}, NOTHING_LOCAL
        directory = files_directory(lock, "model.adapter")
    adapter = read_adapter(directory)
    if lock["kind"] == "directory":
        lock["files"] = {file: sha256_file(directory / file) for file in ADAPTER_FILES}
    refuse_other_base(directory, adapter, model_lock)
    return lock, watched


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
