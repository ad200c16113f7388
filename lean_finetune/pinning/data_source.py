"""Pinning of the data: locks/data.json names the files that later stages read, with their content hashes."""

from pathlib import Path
from typing import Any

from lean_finetune.config.data_schema import HELDOUT_SOURCE, Data, Source, named_sources
from lean_finetune.config.field_types import HUB_PREFIX
from lean_finetune.core.atomic_files import sha256_file, write_json
from lean_finetune.core.errors import UserError
from lean_finetune.pinning.file_formats import KNOWN_NAMES, file_kind
from lean_finetune.pinning.hub import HUB_ID, list_files, split_files
from lean_finetune.pinning.local_source import pin_local, refuse_split
from lean_finetune.pinning.locate import DATA_SCHEMA, template_file
from lean_finetune.pinning.watched_links import DIRECTORY_LINKS, refuse_unignored, watch_sources


def pin_data(data: Data, locks: Path) -> str | None:
    """Write locks/data.json for data.source and data.heldout_source, and link local files so that DVC watches them.

    A list entry that can have them inherits the section's `revision`, `config` and `split`, unless it sets its own. A
    source's weight is not pinned, because it does not change the rows. Returns a note for the user, None for none.
    Raises UserError if a source is missing, empty, of an unknown kind, or on a hub that cannot be reached.
    """
    pinned, watched = [], []
    shared = {"revision": data.revision, "config": data.config, "split": data.split}
    named = named_sources(data.source)
    trained = len(named)
    if data.heldout_source is not None:
        named += named_sources(data.heldout_source, HELDOUT_SOURCE)
    for parameter, one in named:
        if one.source.startswith(HUB_PREFIX):
            inherited = {key: value for key, value in shared.items() if getattr(one, key) is None}
            pinned.append(_pin_hub(parameter, one.model_copy(update=inherited)))
        else:
            local = pin_local(parameter, one.source, one.split, data.split)
            refuse_unignored(parameter, one.source, local.paths)
            watched.append(local)
            pinned.append(_entry(one, local.kind, local.files, split=local.split))
    if data.split is not None and all(entry["split"] is None for entry in pinned):
        refuse_split("data.split", data.split, ", ".join(repr(entry["source"]) for entry in pinned[:3]))
    _hold_out(pinned[:trained], pinned[trained:])
    template = template_file(data.chat_template)
    lock = {
        "schema": DATA_SCHEMA,
        "bytes": sum(file["bytes"] for entry in pinned for file in entry["files"]),
        "sources": pinned,
        "chat_template_sha256": None if template is None else sha256_file(template),
    }
    write_json(locks / "data.json", lock)
    unlinked = watch_sources(locks, watched, template)
    if not unlinked:
        return None
    return (
        f"data.source: DVC notices edited and removed files of every directory, but added ones in the first "
        f"{len(DIRECTORY_LINKS)} alone; after adding files to {unlinked[0]} or a later one run `dvc repro -sf pin_data`"
    )


def _hold_out(trained: list[dict[str, Any]], heldout: list[dict[str, Any]]) -> None:
    """Mark the held-out entries, and refuse one with a file that is also trained."""
    digests = {file.get("sha256") or file["blob_id"]: one["source"] for one in trained for file in one["files"]}
    for entry in heldout:
        entry["heldout"] = True
        for file in entry["files"]:
            if (digest := file.get("sha256") or file["blob_id"]) in digests:
                raise UserError(
                    f"{HELDOUT_SOURCE}: {file['path']} has the content of a data.source file ({digests[digest]}), so "
                    f"held-out rows would be trained; got {entry['source']!r}; name other files or another split"
                )


def _pin_hub(parameter: str, source: Source) -> dict[str, Any]:
    """The entry of a hub data set: the files of one split at the current commit of its revision."""
    repo_id = source.source.removeprefix(HUB_PREFIX)
    if not HUB_ID.fullmatch(repo_id):
        raise UserError(f"{parameter}: a hub data set is {HUB_PREFIX}org/name; got {source.source!r}")
    commit, everything = list_files(parameter, repo_id, "dataset", source.revision)
    split, paths = split_files(parameter, repo_id, commit, source.config, source.split)
    for path in paths:
        if path not in everything or file_kind(path) is None:
            raise UserError(
                f"{parameter}: {source.source} at {commit[:12]} has split {split!r} in {path}, which is not one of its "
                f"files of a known kind ({KNOWN_NAMES}); download and convert it, then name that file"
            )
    files = [{"path": path, "bytes": everything[path][0], "blob_id": everything[path][1]} for path in paths]
    return _entry(source, "hub", files, split=split, revision=commit)


def _entry(
    source: Source, kind: str, files: list[dict[str, Any]], *, split: str | None, revision: str | None = None
) -> dict[str, Any]:
    """An entry of the lock."""
    return {
        "source": source.source,
        "kind": kind,
        "revision": revision,
        "config": source.config if kind == "hub" else None,
        "split": split,
        "format": source.format,
        "columns": source.columns,
        "rows": source.rows,
        "files": files,
    }
