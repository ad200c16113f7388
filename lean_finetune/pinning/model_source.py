"""Pin the model, and an adapter of it: a local directory by the content of its files, a hub id by its commit."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cuda_memory.user_paths import user_path
from lean_finetune.core.atomic_files import find_source, repo_root, sha256_file, write_json
from lean_finetune.core.errors import UserError
from lean_finetune.pinning.adapter_files import read_adapter
from lean_finetune.pinning.config_file import (
    ADAPTER_CONFIG,
    ADAPTER_FILES,
    CONFIG_FILE,
    IS_ADAPTER,
    NAME_BASE,
    refuse_adapter,
)
from lean_finetune.pinning.data_source import refuse_unignored
from lean_finetune.pinning.hub import HUB_ID, download, list_files
from lean_finetune.pinning.locate import (
    TINY,
    TINY_DIRECTORY,
    TOKENIZER_FILES,
    adapter_on_hub,
    example_names,
    files_directory,
    model_directory,
)
from lean_finetune.pinning.model_files import (
    CONFIG_FILES,
    INDEX,
    WEIGHTS,
    check_config,
    check_tokenizer,
    check_weights,
    read_stop_ids,
    shard_names,
)
from lean_finetune.pinning.watched_links import NOTHING_LOCAL, watch

Facts = Callable[[dict[str, Any]], dict[str, Any]]
"""From config.json to what the tokenizer's lock has of it."""


def pin_model(
    name: str,
    revision: str | None,
    locks: Path,
    *,
    adapter: str | None = None,
    adapter_revision: str | None = None,
    tokens: Sequence[str | int] = (),
    facts: Facts = lambda config: {},
) -> None:
    """Write locks/model.json and locks/tokenizer.json; link the model and an adapter as locks/watched-model, -adapter.

    The tokenizer's lock has content hashes, the tokens at which generation stops, the `facts` of config.json,
    and no names, so that a model with the same tokenizer does not tokenize again. The model's lock has the ids of the
    trained `tokens`, if there are any.

    Raises UserError if the model is missing, unsafe (pickle, custom code), incomplete, damaged, cannot be reached, or
    is in the checkout where git neither tracks nor ignores it.
    """
    local = TINY_DIRECTORY if name == TINY else find_source(name, "model.name")
    commit = None
    if not local.is_dir():
        kind, watched = "hub", NOTHING_LOCAL
        commit, files, tokenizer, ids = _pin_hub(name, revision, tokens, facts)
    elif revision is not None:
        raise UserError(
            f"model.revision: only a hub model has revisions; got {revision!r} with model.name={name!r}; "
            "leave model.revision blank"
        )
    else:
        # The shipped model is a part of the library, which pin_code watches.
        kind, watched = (TINY, NOTHING_LOCAL) if name == TINY else ("directory", local)
        if name != TINY:
            refuse_unignored("model.name", name, (path for path in local.iterdir() if path.is_file()))
        files, tokenizer, ids = _pin_directory(local, tokens, facts)
    lock: dict[str, Any] = {"kind": kind, "name": name, "revision": commit, "files": files}
    lock |= {"tokenizer_files": sorted(tokenizer["files"])} | ({"trained_tokens": ids} if ids else {})
    watched_adapter = NOTHING_LOCAL
    if adapter is not None:
        lock["adapter"], watched_adapter = pin_adapter(adapter, adapter_revision, lock)
    write_json(locks / "model.json", lock)
    write_json(locks / "tokenizer.json", tokenizer)
    watch(locks / "watched-model", watched)
    watch(locks / "watched-adapter", watched_adapter)


Pinned = tuple[dict[str, str], dict[str, Any], list[int]]
"""Hashes of the model's files, the content of the tokenizer's lock, and the ids that are trained."""


def _tokenizer_lock(files: dict[str, str], directory: Path, config: dict[str, Any], facts: Facts) -> dict[str, Any]:
    """The content of locks/tokenizer.json; `files` are hashes of the tokenizer's files."""
    return {"files": files, "stop_ids": read_stop_ids(directory, config), **facts(config)}


def _pin_directory(directory: Path, tokens: Sequence[str | int], facts: Facts) -> Pinned:
    """Check a local directory."""
    names = {path.name for path in directory.iterdir() if path.is_file()}
    if CONFIG_FILE not in names:
        refuse_adapter(directory, str(directory))
    _check_names(names, str(directory))
    config = check_config(directory)
    ids = check_tokenizer(directory, config, tokens)
    shards = shard_names(directory)
    for shard in shards:
        check_weights(directory / shard)

    def hashes(wanted: Iterable[str]) -> dict[str, str]:
        return {name: sha256_file(directory / name) for name in wanted if (directory / name).is_file()}

    return (
        hashes([*CONFIG_FILES, INDEX, *shards]),
        _tokenizer_lock(hashes(TOKENIZER_FILES), directory, config, facts),
        ids,
    )


def _pin_hub(name: str, revision: str | None, tokens: Sequence[str | int], facts: Facts) -> tuple[str, *Pinned]:
    """A hub model's commit, and what is pinned. Small files are downloaded and checked."""
    if name in example_names():
        raise UserError(
            f"model.name: {name} is a configuration without weights, for predictions; name the model itself"
        )
    if not HUB_ID.fullmatch(name):
        raise UserError(
            f"model.name: must be {TINY}, an existing directory, or a hub id org/name; got {name!r}; check the path"
        )
    commit, everything = list_files("model.name", name, "model", revision)
    blobs = {path: blob_id for path, (_, blob_id) in everything.items()}
    _check_names(set(blobs), f"{name} at {commit[:12]}")
    small = [file for file in (*CONFIG_FILES, INDEX, *TOKENIZER_FILES) if file in blobs]
    directory = download("model.name", name, "model", commit, small)
    config = check_config(directory)
    ids = check_tokenizer(directory, config, tokens)
    wanted = [file for file in (*CONFIG_FILES, INDEX) if file in blobs] + shard_names(directory)
    if missing := [file for file in wanted if file not in blobs]:
        raise UserError(f"model.name: {INDEX} of {name} names {missing[0]}, which it lacks; name another revision")
    tokenizer = {file: blobs[file] for file in TOKENIZER_FILES if file in blobs}
    return commit, {file: blobs[file] for file in wanted}, _tokenizer_lock(tokenizer, directory, config, facts), ids


def _check_names(names: set[str], where: str) -> None:
    """Refuse a model without a required file, or with pickled weights."""
    if CONFIG_FILE not in names and ADAPTER_CONFIG in names:
        raise UserError(f"model.name: {where} {IS_ADAPTER}; {NAME_BASE}")
    if CONFIG_FILE not in names:
        raise UserError(f"model.name: {where} has no config.json; name a directory that transformers saved")
    if "tokenizer.json" not in names:
        raise UserError(
            f"model.name: {where} has no tokenizer.json; save its fast tokenizer there with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    if WEIGHTS not in names and INDEX not in names:
        pickles = sorted(name for name in names if name.endswith((".bin", ".pt", ".pth")))
        found = f" (only {pickles[0]}, a pickle, which can run code)" if pickles else ""
        raise UserError(
            f"model.name: {where} has no {WEIGHTS} or {INDEX}{found}; save the model with "
            "save_pretrained(...), which writes safetensors"
        )


# Pinning of the adapter that training goes on from (model.adapter): a local directory, or a repository of the hub.

TUNED = Path("data/tuned")
"""Output of stage train, which DVC deletes before the stage runs."""


def pin_adapter(name: str, revision: str | None, model_lock: Mapping[str, Any]) -> tuple[dict[str, Any], Path]:
    """The entry of locks/model.json for an adapter, and what DVC watches.

    Raises UserError if it is missing, no LoRA adapter in safetensors, damaged, of another base, or cannot be reached.
    """
    directory = find_source(name, "model.adapter")
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
    path = user_path(base, f"model.adapter: {directory / ADAPTER_CONFIG}: base_model_name_or_path")
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
