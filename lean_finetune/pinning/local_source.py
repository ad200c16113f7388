"""Pinning of local data: a file, a glob, a directory, or a folder written by `datasets.save_to_disk`."""

import glob
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lean_finetune.config.field_types import HUB_PREFIX
from lean_finetune.core.atomic_files import find_source, repo_root, sha256_file
from lean_finetune.core.errors import UserError
from lean_finetune.pinning.file_formats import KNOWN_NAMES, file_kind, glob_base, is_documentation, is_hidden
from lean_finetune.pinning.hub import DEFAULT_SPLIT
from lean_finetune.pinning.json_objects import NotAnObject, read_object

OUTPUTS = (
    *("data/tokens", "data/batches", "data/estimate", "data/train", "data/tuned", "data/evaluate", "data/report"),
    *("locks", "metrics"),
)
"""Paths that the stages write, as in dvc.yaml."""
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
        path = find_source(source)
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
    _refuse_outputs(parameter, source, path)
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
    root = find_source(base)
    if not root.is_dir():
        raise UserError(f"{parameter}: no such directory {base!r}; got {source!r}; correct the glob")
    _refuse_outputs(parameter, source, root)
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
        if split not in splits:
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
        if not isinstance(name, str) or Path(name).name != name or file_kind(name) is None:
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


def _refuse_outputs(parameter: str, source: str, path: Path) -> None:
    """Refuse a source inside an output of the pipeline, or around one: each run would change it."""
    for root in (Path(), repo_root()):
        for output in OUTPUTS:
            # realpath, unlike resolve, accepts loops of links.
            written, read = (Path(os.path.realpath(one)) for one in (root / output, path))
            if written == read or written in read.parents or read in written.parents:
                raise UserError(
                    f"{parameter}: must not contain or be in {output}, which the pipeline writes; got {source!r}; name "
                    "another path, or copy the rows there first"
                )


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
    if size_bytes == 0:
        raise UserError(f"{parameter}: {path} is empty; put rows into it or name another file")
    return {"path": name, "bytes": size_bytes, "sha256": digest}
