"""Pin the data source: files of this machine, a directory or a hub data set."""

import glob
import os
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuda_memory.units import counted
from lean_finetune.config.data_schema import HELDOUT_SOURCE, Data, Source, named_sources
from lean_finetune.config.field_types import HUB_PREFIX
from lean_finetune.core.atomic_files import find_source, repo_root, sha256_file, write_json
from lean_finetune.core.errors import UserError
from lean_finetune.core.file_names import is_name_inside
from lean_finetune.pinning.config_file import (
    KNOWN_NAMES,
    POINTER,
    NotAnObject,
    file_kind,
    glob_base,
    is_documentation,
    is_hidden,
    read_object,
    reason_of,
)
from lean_finetune.pinning.hub import DEFAULT_SPLIT, HUB_ID, list_files, split_files
from lean_finetune.pinning.locate import template_file
from lean_finetune.pinning.read_locks import DATA_SCHEMA
from lean_finetune.pinning.watched_links import DIRECTORY_LINKS, Watched, git_output, refuse_outputs, watch_sources

SAVED_STATE = "state.json"
SAVED_SPLITS = "dataset_dict.json"


@dataclass(frozen=True, kw_only=True)
class LocalSource:
    """A local source and its files."""

    kind: str
    """`file`, `glob`, `directory` or `saved`."""
    root: Path
    """Path that DVC must watch to notice every change."""
    files: list[dict[str, Any]]
    split: str | None

    @property
    def paths(self) -> list[Path]:
        """Paths of its files."""
        return [self.root if self.kind == "file" else self.root / file["path"] for file in self.files]


def pin_local(parameter: str, source: str, split: str | None, shared_split: str | None) -> LocalSource:
    """Pin a path by the content of its files, in order of path.

    `split` is the source's; `shared_split` is the section's, used only for sources that have splits. Raises UserError
    if it is missing, empty, of an unknown kind, or written by the pipeline itself.
    """
    if "://" in source:
        raise UserError(
            f"{parameter}: URLs are not fetched, except data sets of the hub ({HUB_PREFIX}org/name); got {source!r}; "
            "download the file and name it"
        )
    try:
        path = find_source(source, parameter)
        is_saved = (path / SAVED_SPLITS).is_file() or (path / SAVED_STATE).is_file()
    except OSError as error:
        raise UserError(
            f"{parameter}: {error.filename} cannot be reached ({error.strerror}); got {source!r}; change the "
            "permissions of the directories above it"
        ) from error
    if split is not None and not is_saved:
        refuse_split(_sibling(parameter, "split"), split, repr(source))
    if not path.exists() and glob.has_magic(source):
        return _pin_glob(parameter, source)
    refuse_outputs(parameter, source, path)
    if path.is_file():
        if file_kind(path.name) is None:
            raise UserError(
                f"{parameter}: a file must be {KNOWN_NAMES}; got {source!r}; convert it to one JSON row a line"
            )
        return LocalSource(kind="file", root=path, files=[_pin_file(parameter, path, path.name)], split=None)
    if not path.exists():
        if source.startswith("~"):
            raise UserError(f"{parameter}: ~ is not expanded; got {source!r}; write the full path")
        raise UserError(
            f"{parameter}: no such file or directory; got {source!r}; name a file ({KNOWN_NAMES}), a directory of "
            f"such files, or a hub data set as {HUB_PREFIX}org/name"
        )
    if not path.is_dir():
        raise UserError(f"{parameter}: is neither a file nor a directory; got {source!r}; copy its rows into a file")
    if is_saved:
        return _pin_saved(parameter, source, path, split, shared_split)
    names = sorted(_names_below(parameter, path, deep=True), key=Path.as_posix)
    files = _pin_matches(parameter, path, names, "the directory")
    if not files:
        raise UserError(f"{parameter}: the directory has no data file ({KNOWN_NAMES}); got {source!r}")
    return LocalSource(kind="directory", root=path, files=files, split=None)


def _pin_glob(parameter: str, source: str) -> LocalSource:
    """Pin the files that a glob matches."""
    base = glob_base(source)
    root = find_source(base, parameter)
    if not root.is_dir():
        raise UserError(f"{parameter}: no such directory {base!r}; got {source!r}; correct the glob")
    refuse_outputs(parameter, source, root)
    pattern = str(Path(source).relative_to(base))
    # glob silently skips directories without permission, so all of them are listed first.
    _names_below(parameter, root, deep=len(Path(pattern).parts) > 1 or "**" in pattern)
    names = sorted({Path(name) for name in glob.glob(pattern, root_dir=root, recursive=True)}, key=Path.as_posix)
    files = _pin_matches(parameter, root, names, f"{source!r}")
    if not files:
        raise UserError(f"{parameter}: the glob matches no data file ({KNOWN_NAMES}); got {source!r}; correct it")
    return LocalSource(kind="glob", root=root, files=files, split=None)


def _names_below(parameter: str, root: Path, *, deep: bool) -> list[Path]:
    """Relative names in a directory and, if `deep`, below it, except in hidden directories."""

    def refuse(error: OSError) -> None:
        raise UserError(
            f"{parameter}: {error.filename} cannot be listed ({error.strerror}); change its permissions, or name the "
            "files to read by a glob such as data/*.jsonl"
        ) from error

    found: list[Path] = []
    for directory, folders, files in os.walk(root, onerror=refuse):
        found += [(Path(directory) / name).relative_to(root) for name in (*folders, *files)]
        folders[:] = [name for name in folders if deep and not name.startswith(".")]
    return found


def _pin_matches(parameter: str, root: Path, names: list[Path], owner: str) -> list[dict[str, Any]]:
    """Pin the data files among relative names. A file that may have rows but cannot be read is refused."""
    pinned = []
    for name in names:
        if is_hidden(name):
            continue
        try:
            name.as_posix().encode()
        except UnicodeEncodeError:
            raise UserError(f"{parameter}: {owner} has {str(name)!r}, a name that is not UTF-8; rename it") from None
        _refuse_odd_link(parameter, root, name)
        if is_documentation(name.name) or (root / name).is_dir():
            continue
        if not (root / name).is_file():
            raise UserError(f"{parameter}: {root / name} is neither a file nor a directory; move it away")
        if file_kind(name.name) is None:
            raise UserError(
                f"{parameter}: {owner} has {name.as_posix()}, which is of no known kind ({KNOWN_NAMES}); move it "
                "away, convert it, or name the files to read by a glob such as data/*.jsonl"
            )
        pinned.append(_pin_file(parameter, root / name, name.as_posix()))
    return pinned


def _pin_saved(parameter: str, source: str, path: Path, own_split: str | None, shared_split: str | None) -> LocalSource:
    """Pin the Arrow files of a saved Dataset or of one split of a saved DatasetDict, in the order of state.json."""
    folder, split = Path(), None
    if (path / SAVED_SPLITS).is_file():
        splits = _saved_list(parameter, path / SAVED_SPLITS, "splits")
        split = own_split or shared_split or DEFAULT_SPLIT
        if split not in splits or not is_name_inside(split):
            raise UserError(
                f"{_sibling(parameter, 'split')}: {source!r} has no split {split!r}; "
                f"name one of {', '.join(map(str, splits))}"
            )
        folder = Path(split)
    elif own_split is not None:
        refuse_split(_sibling(parameter, "split"), own_split, repr(source))
    files = []
    for entry in _saved_list(parameter, path / folder / SAVED_STATE, "_data_files"):
        name = entry.get("filename") if isinstance(entry, dict) else None
        if not (is_name_inside(name) and Path(name).name == name and file_kind(name) is not None):
            raise UserError(
                f"{parameter}: {path / folder / SAVED_STATE} names {name!r}, not an .arrow file there; save again"
            )
        files.append(_pin_file(parameter, path / folder / name, (folder / name).as_posix()))
    if not files:
        raise UserError(f"{parameter}: {path / folder / SAVED_STATE} names no data files; save the data set again")
    return LocalSource(kind="saved", root=path, files=files, split=split)


def _saved_list(parameter: str, path: Path, key: str) -> list[Any]:
    """A list in a JSON file written by save_to_disk."""
    try:
        value = read_object(path)
    except NotAnObject as error:
        raise UserError(f"{parameter}: {path} {error}; save the data set again") from None
    if not isinstance(value.get(key), list):
        raise UserError(f"{parameter}: {path} has no list {key!r}; save the data set again with save_to_disk")
    return value[key]


def refuse_split(dotted: str, split: str, shown: str) -> None:
    """Refuse a split of a source without splits, which would be silently ignored."""
    raise UserError(
        f"{dotted}: only hub data sets and saved DatasetDicts have splits; got {split!r} with {shown}; leave it blank"
    )


def _sibling(parameter: str, key: str) -> str:
    """The dotted name of another key in the section or list entry of `parameter`."""
    return f"{parameter.rpartition('.')[0]}.{key}"


def _refuse_odd_link(parameter: str, root: Path, name: Path) -> None:
    """Refuse a link to nothing or to a directory, which would be silently skipped or not watched."""
    for part in (name, *name.parents[:-1]):
        path = root / part
        if not path.is_symlink() or path.is_file():
            continue
        if path.exists():
            found = "a link to a directory, which is not followed; put the directory itself there, or name it"
        else:
            found = f"a link to {os.readlink(path)}, which does not exist; correct or remove it"
        raise UserError(f"{parameter}: {path} is {found}")


def _pin_file(parameter: str, path: Path, name: str) -> dict[str, Any]:
    """The lock's entry of a local file."""
    try:
        size_bytes = path.stat().st_size
        digest = sha256_file(path)
    except OSError as error:
        raise UserError(f"{parameter}: {path} cannot be read ({error.strerror}); change its permissions") from error
    if (what := reason_of(path)) == POINTER:  # Other kinds are refused by the format, or are text of the user's.
        raise UserError(f"{parameter}: {path} cannot be used ({what}); then run again")
    if size_bytes == 0:
        raise UserError(f"{parameter}: {path} is empty; put rows into it or name another file")
    return {"path": name, "bytes": size_bytes, "sha256": digest}


# Pinning of the data: locks/data.json names the files that later stages read, with their content hashes.


@dataclass(frozen=True, kw_only=True)
class NamedFiles:
    """Files that rows name by path."""

    key: str
    """Of a source's entry in the lock, for those that it names."""
    word: str
    """How messages call one."""
    find: Callable[[Mapping[str, Any]], Mapping[str, Path]]
    """From an entry of the lock to the files that its rows name, by name."""
    pin: Callable[[Mapping[str, Path]], dict[str, Any]]
    """From these to what the lock has of them."""


def pin_data(data: Data, locks: Path, named_files: NamedFiles) -> str | None:
    """Write locks/data.json for data.source and data.heldout_source, and link local files so that DVC watches them.

    The files that rows name are pinned and watched too.
    A list entry that can have them inherits the section's `revision`, `config` and `split`, unless it sets its own. A
    source's weight is not pinned, because it does not change the rows. Returns a note for the user, None for none.
    Raises UserError if a source is missing, empty, of an unknown kind, or on a hub that cannot be reached.
    """
    pinned, watched = [], []
    named = named_sources(data.source)
    trained = len(named)
    if data.heldout_source is not None:
        named += named_sources(data.heldout_source, HELDOUT_SOURCE)
    for parameter, one in named:
        entry, local = _pin_source(parameter, one, data)
        pinned.append(entry)
        if local is not None:
            others = named_files.find(entry)
            if others:
                entry[named_files.key] = named_files.pin(others)
            refuse_unignored(parameter, one.source, [*local.paths, *others.values()])
            watched.append(Watched(root=local.root, files=local.paths, named=others))
    if data.split is not None and all(entry["split"] is None for entry in pinned):
        refuse_split("data.split", data.split, ", ".join(repr(entry["source"]) for entry in pinned[:3]))
    _hold_out(pinned[:trained], pinned[trained:])
    template = template_file(data.chat_template)
    lock = {
        "schema": DATA_SCHEMA,
        "bytes": sum(file["bytes"] for entry in pinned for file in entry["files"]),
        "sources": pinned,
        "chat_template_sha256": None if template is None else _template_hash(template),
    }
    write_json(locks / "data.json", lock)
    unlinked, unwatched = watch_sources(locks, watched, template)
    missing = sum(entry[named_files.key]["missing"] for entry in pinned if named_files.key in entry)
    return "; ".join(_notes(unlinked, unwatched, missing, named_files.word)) or None


def _template_hash(template: Path) -> str:
    try:
        return sha256_file(template)
    except OSError as error:
        raise UserError(f"data.chat_template: {template} cannot be read ({error.strerror}); name another") from None


def _notes(unlinked: list[Path], unwatched: list[Path], missing: int, word: str) -> Iterator[str]:
    """What DVC cannot notice."""
    again = "run `dvc repro -sf pin_data`"
    if unlinked:
        yield (
            f"data.source: DVC notices edited and removed files of every directory, but added ones in the first "
            f"{len(DIRECTORY_LINKS)} alone; after adding files to {unlinked[0]} or a later one {again}"
        )
    if unwatched:
        yield (
            f"data.source: DVC does not notice changes of {counted(len(unwatched), word)}, such as "
            f"{unwatched[0]}; after changing them {again}, or put all {word}s of a source into one directory"
        )
    if missing:
        yield f"data.source: rows name {counted(missing, word)} that cannot be read; after adding them {again}"


def _pin_source(parameter: str, one: Source, data: Data) -> tuple[dict[str, Any], LocalSource | None]:
    """The lock's entry of a source, and what DVC must watch of a local one."""
    shared = {"revision": data.revision, "config": data.config, "split": data.split}
    if one.source.startswith(HUB_PREFIX):
        inherited = {key: value for key, value in shared.items() if getattr(one, key) is None}
        return _pin_hub(parameter, one.model_copy(update=inherited)), None
    local = pin_local(parameter, one.source, one.split, data.split)
    return _entry(one, local.kind, local.files, split=local.split), local


def unwatched_lock(parameter: str, data: Data) -> dict[str, Any]:
    """What locks/data.json would have for data.source; nothing is written, and DVC watches nothing.

    Messages call the source `parameter`.

    Raises:
        UserError: the source is missing, empty, of an unknown kind, or on a hub that cannot be reached.
    """
    template = template_file(data.chat_template)
    named = named_sources(data.source, parameter)
    return {
        "schema": DATA_SCHEMA,
        "sources": [_pin_source(name, one, data)[0] for name, one in named],
        "chat_template_sha256": None if template is None else _template_hash(template),
    }


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


def refuse_unignored(parameter: str, source: str, paths: Iterable[Path]) -> None:
    """Refuse files in the user's checkout that git neither tracks nor ignores.

    `dvc exp apply` stashes untracked files: it copies them into .git, and deletes ignored files that lie in the same
    untracked directory (libgit2 removes the directory with everything in it). Raises UserError, naming the line for
    .git/info/exclude that keeps git away from them.
    """
    root = repo_root().resolve()
    command = ["-C", str(root), "ls-files", "-z", "--others", "--exclude-standard", "--directory"]
    try:
        listed = git_output(*command, "--no-empty-directory")
    except (OSError, subprocess.CalledProcessError):
        return  # Without git nothing is stashed.
    untracked = {root / os.fsdecode(name): os.fsdecode(name) for name in listed.split(b"\0") if name}
    is_new = not untracked.keys().isdisjoint((root, root / "dvc.yaml"))
    for path in map(Path.resolve, paths):
        if found := next((untracked[one] for one in (path, *path.parents) if one in untracked), None):
            if is_new:
                raise UserError(
                    f"{parameter}: git does not track this project yet, and `dvc exp apply` could delete what git does "
                    f"not track; got {source!r}; `git add` its files first"
                )
            raise UserError(
                f"{parameter}: git neither tracks nor ignores {found} in this checkout, so `dvc exp apply` would copy "
                f"it into .git and could delete files in it; got {source!r}; move it out of the checkout, or add the "
                f"line /{found} to .git/info/exclude"
            )
