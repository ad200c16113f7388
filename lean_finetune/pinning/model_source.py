"""Pinning of the model: a local directory by the content of its files, a hub id by its commit."""

from collections.abc import Iterable
from pathlib import Path

from lean_finetune.core.atomic_files import find_source, sha256_file, write_json
from lean_finetune.core.errors import UserError
from lean_finetune.pinning.config_file import ADAPTER_CONFIG, CONFIG_FILE, IS_ADAPTER, NAME_BASE, refuse_adapter
from lean_finetune.pinning.hub import HUB_ID, download, list_files
from lean_finetune.pinning.locate import TINY, TINY_DIRECTORY, TINY_IN_CHECKOUT, TOKENIZER_FILES
from lean_finetune.pinning.model_checks import (
    INDEX,
    WEIGHTS,
    check_config,
    check_tokenizer,
    check_weights,
    read_stop_ids,
    shard_names,
)
from lean_finetune.pinning.watched_links import NOTHING_LOCAL, refuse_unignored, watch

CONFIG_FILES = (CONFIG_FILE, "generation_config.json")


def pin_model(name: str, revision: str | None, locks: Path) -> None:
    """Write locks/model.json and locks/tokenizer.json, and link the model as locks/watched-model.

    The tokenizer's lock has content hashes, the tokens at which generation stops, and no names, so that a model with
    the same tokenizer does not tokenize again.

    Raises UserError if the model is missing, unsafe (pickle, custom code), incomplete, damaged, cannot be reached, or
    is in the checkout where git neither tracks nor ignores it.
    """
    local = TINY_DIRECTORY if name == TINY else find_source(name)
    commit = None
    if not local.is_dir():
        kind, watched = "hub", NOTHING_LOCAL
        commit, files, tokenizer, stops = _pin_hub(name, revision)
    elif revision is not None:
        raise UserError(
            f"model.revision: only a hub model has revisions; got {revision!r} with model.name={name!r}; "
            "leave model.revision blank"
        )
    else:
        # DVC runs and watches the working directory's copy of tiny, even if this package was imported from elsewhere.
        kind, watched = (TINY, TINY_IN_CHECKOUT) if name == TINY else ("directory", local)
        if name != TINY:
            refuse_unignored("model.name", name, (path for path in local.iterdir() if path.is_file()))
        files, tokenizer, stops = _pin_directory(local)
    lock = {"kind": kind, "name": name, "revision": commit, "files": files, "tokenizer_files": sorted(tokenizer)}
    write_json(locks / "model.json", lock)
    write_json(locks / "tokenizer.json", {"files": tokenizer, "stop_ids": stops})
    watch(locks / "watched-model", watched)


def _pin_directory(directory: Path) -> tuple[dict[str, str], dict[str, str], list[int]]:
    """Check a local directory; return the hashes of (model files, tokenizer files), and its stop tokens."""
    names = {path.name for path in directory.iterdir() if path.is_file()}
    if CONFIG_FILE not in names:
        refuse_adapter(directory, str(directory))
    _check_names(names, str(directory))
    config = check_config(directory)
    check_tokenizer(directory, config)
    shards = shard_names(directory)
    for shard in shards:
        check_weights(directory / shard)

    def hashes(wanted: Iterable[str]) -> dict[str, str]:
        return {name: sha256_file(directory / name) for name in wanted if name in names}

    return hashes([*CONFIG_FILES, INDEX, *shards]), hashes(TOKENIZER_FILES), read_stop_ids(directory, config)


def _pin_hub(name: str, revision: str | None) -> tuple[str, dict[str, str], dict[str, str], list[int]]:
    """A hub model's (commit, model files, tokenizer files, stop tokens). Small files are downloaded and checked."""
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
    check_tokenizer(directory, config)
    wanted = [file for file in (*CONFIG_FILES, INDEX) if file in blobs] + shard_names(directory)
    if missing := [file for file in wanted if file not in blobs]:
        raise UserError(f"model.name: {INDEX} of {name} names {missing[0]}, which it lacks; name another revision")
    tokenizer = {file: blobs[file] for file in TOKENIZER_FILES if file in blobs}
    return commit, {file: blobs[file] for file in wanted}, tokenizer, read_stop_ids(directory, config)


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
