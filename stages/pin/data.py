"""Pin the data: which files, of which content, every later stage reads."""

import os
from pathlib import Path
from typing import Any

from stages.errors import UserError
from stages.files import find_source, repo_root, sha256_file, write_json
from stages.params import HUB_PREFIX
from stages.pin.hub import HUB_ID, list_files
from stages.pin.watch import NOTHING_LOCAL, watch

DATA_SUFFIXES = (".jsonl", ".json")
# What the stages write, as dvc.yaml has it.
OUTPUTS = (
    *("data/tokens", "data/batches", "data/estimate", "data/train", "data/tuned", "data/evaluate", "data/report"),
    *("locks", "metrics"),
)
KNOWN_SUFFIXES = " or ".join(DATA_SUFFIXES)


def pin_data(source: str, revision: str | None, locks: Path) -> None:
    """Write `locks/data.json` for `source` and point `locks/watched-data` at it.

    Raises:
        UserError: the source is missing, empty, of an unknown kind, or on a hub that cannot be reached.
    """
    if source.startswith(HUB_PREFIX):
        lock, watched = _pin_hub(source, revision), NOTHING_LOCAL
    else:
        watched = find_source(source)
        lock = _pin_local(source, watched)
    lock["bytes"] = sum(file["bytes"] for file in lock["files"])
    write_json(locks / "data.json", lock)
    watch(locks / "watched-data", watched)


def _pin_local(source: str, path: Path) -> dict[str, Any]:
    """The lock of a file, or of a directory's data files in order of path."""
    _refuse_outputs(source, path)
    if path.is_file():
        if path.suffix not in DATA_SUFFIXES:
            raise UserError(
                f"data.source: a file must be {KNOWN_SUFFIXES}; got {source!r}; convert it to one JSON row a line"
            )
        return _lock("file", source, [_pin_file(path, path.name)])
    if not path.exists():
        if source.startswith("~"):
            raise UserError(f"data.source: ~ is not expanded; got {source!r}; write the whole path")
        raise UserError(
            f"data.source: no such file or directory; got {source!r}; name a {KNOWN_SUFFIXES} file, a directory of "
            f"them, or a hub data set as {HUB_PREFIX}org/name"
        )
    names = {file.relative_to(path) for file in path.rglob("*")}
    for name in sorted(names):
        _refuse_odd_link(path / name, name)
    files = [
        _pin_file(path / name, name.as_posix())
        for name in sorted(names, key=Path.as_posix)
        if _is_data(name) and (path / name).is_file()
    ]
    if not files:
        raise UserError(f"data.source: the directory holds no {KNOWN_SUFFIXES} file; got {source!r}")
    return _lock("directory", source, files)


def _refuse_outputs(source: str, path: Path) -> None:
    """Refuse a source that a stage writes into: each run would change what the next one reads."""
    for root in (Path(), repo_root()):
        for output in OUTPUTS:
            written, read = (root / output).resolve(), path.resolve()
            if written == read or written in read.parents or read in written.parents:
                raise UserError(
                    f"data.source: must not hold, or lie in, {output}, which the pipeline writes; got {source!r}; name "
                    "another path, or copy the rows there first"
                )


def _refuse_odd_link(path: Path, name: Path) -> None:
    """Refuse a link below a directory that would be skipped in silence: to nothing, or to another directory."""
    if not path.is_symlink() or _is_hidden(name) or path.is_file():
        return
    if path.exists():
        found = "a link to a directory, which is not followed; put the directory itself there, or name it"
    else:
        found = f"a link to {os.readlink(path)}, which does not exist; mend or remove it"
    raise UserError(f"data.source: {path} is {found}")


def _pin_hub(source: str, revision: str | None) -> dict[str, Any]:
    """The lock of a hub data set's data files at the commit that `revision` names now."""
    repo_id = source.removeprefix(HUB_PREFIX)
    if not HUB_ID.fullmatch(repo_id):
        raise UserError(f"data.source: a hub data set is {HUB_PREFIX}org/name; got {source!r}")
    commit, everything = list_files("data.source", repo_id, "dataset", revision)
    files = [
        {"path": file.path, "bytes": file.size_bytes, "blob_id": file.blob_id}
        for file in everything
        if _is_data(Path(file.path))
    ]
    if not files:
        endings = ", ".join(sorted({Path(file.path).suffix or file.path for file in everything}))
        raise UserError(
            f"data.source: {source} at {commit[:12]} holds no {KNOWN_SUFFIXES} file (only {endings}); download and "
            "convert it to one JSON row a line, then name that file"
        )
    return _lock("hub", source, files, commit)


def _is_data(path: Path) -> bool:
    """Whether a relative path names a data file that is not hidden."""
    return path.suffix in DATA_SUFFIXES and not _is_hidden(path)


def _is_hidden(path: Path) -> bool:
    """Whether a part of a relative path is hidden."""
    return any(part.startswith(".") for part in path.parts)


def _pin_file(path: Path, name: str) -> dict[str, Any]:
    """One local file's entry in the lock."""
    try:
        size_bytes = path.stat().st_size
        digest = sha256_file(path)
    except OSError as error:
        raise UserError(f"data.source: {path} cannot be read ({error.strerror}); change its permissions") from error
    if size_bytes == 0:
        raise UserError(f"data.source: {path} is empty; put rows into it or name another file")
    return {"path": name, "bytes": size_bytes, "sha256": digest}


def _lock(kind: str, source: str, files: list[dict[str, Any]], revision: str | None = None) -> dict[str, Any]:
    """The lock without its byte total."""
    return {"kind": kind, "source": source, "revision": revision, "files": files}
