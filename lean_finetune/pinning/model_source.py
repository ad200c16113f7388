"""Pin the model: a local directory by the content of its files, a hub id by its commit."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lean_finetune.core.atomic_files import find_source, sha256_file, write_json
from lean_finetune.core.errors import UserError
from lean_finetune.pinning.adapter_source import pin_adapter
from lean_finetune.pinning.config_file import (
    ADAPTER_CONFIG,
    CONFIG_FILE,
    IS_ADAPTER,
    NAME_BASE,
    refuse_adapter,
    vision_patch,
)
from lean_finetune.pinning.data_source import refuse_unignored
from lean_finetune.pinning.hub import HUB_ID, download, list_files
from lean_finetune.pinning.locate import TINY, TINY_DIRECTORY, TOKENIZER_FILES, example_names
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


def pin_model(
    name: str,
    revision: str | None,
    locks: Path,
    *,
    adapter: str | None = None,
    adapter_revision: str | None = None,
    tokens: Sequence[str | int] = (),
) -> None:
    """Write locks/model.json and locks/tokenizer.json; link the model and an adapter as locks/watched-model, -adapter.

    The tokenizer's lock has content hashes, the tokens at which generation stops, the size of a vision tower's patches,
    and no names, so that a model with the same tokenizer does not tokenize again. The model's lock has the ids of the
    trained `tokens`, if there are any.

    Raises UserError if the model is missing, unsafe (pickle, custom code), incomplete, damaged, cannot be reached, or
    is in the checkout where git neither tracks nor ignores it.
    """
    local = TINY_DIRECTORY if name == TINY else find_source(name)
    commit = None
    if not local.is_dir():
        kind, watched = "hub", NOTHING_LOCAL
        commit, files, tokenizer, ids = _pin_hub(name, revision, tokens)
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
        files, tokenizer, ids = _pin_directory(local, tokens)
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


def _tokenizer_lock(files: dict[str, str], directory: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The content of locks/tokenizer.json; `files` are hashes of the tokenizer's files."""
    patch = vision_patch(config)
    lock = {"files": files, "stop_ids": read_stop_ids(directory, config)}
    return lock if patch is None else {**lock, "vision_patch": patch}


def _pin_directory(directory: Path, tokens: Sequence[str | int]) -> Pinned:
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
        return {name: sha256_file(directory / name) for name in wanted if name in names}

    return hashes([*CONFIG_FILES, INDEX, *shards]), _tokenizer_lock(hashes(TOKENIZER_FILES), directory, config), ids


def _pin_hub(name: str, revision: str | None, tokens: Sequence[str | int]) -> tuple[str, *Pinned]:
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
    return commit, {file: blobs[file] for file in wanted}, _tokenizer_lock(tokenizer, directory, config), ids


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
