"""Atomic files and directories: write aside, fsync, rename. A killed run or a full disk leaves nothing half-written."""

import csv
import errno
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lean_finetune.core import progress
from lean_finetune.core.errors import UserError
from lean_finetune.core.file_locks import clear, hold, leave
from lean_finetune.core.signals import held_back

READ_BLOCK_BYTES = 1 << 20
FIGURES = "figures.json"
"""In a stage's output directory: all that it counted. Of these, metrics/ has the results that runs are compared by."""


def repo_root() -> Path:
    """The user's checkout: DVC's root also in `--temp` and queued runs, whose working directory is a copy."""
    return Path(os.environ.get("DVC_ROOT", "."))


def find_source(path: str) -> Path:
    """Where a local path from params.yaml is: beside the working directory, or beside the user's checkout.

    Temporary and queued experiments run in a copy that lacks what git does not track; a directory of which some files
    are tracked and others are not is taken from the checkout, where it is whole.
    """
    here, there = Path(path), repo_root() / path
    if here.is_absolute() or (here.exists() and not _holds_more(there, here)):
        return here
    return there


def _holds_more(whole: Path, copy: Path) -> bool:
    """Whether one directory holds files that the other, a copy of it, lacks."""
    if not (copy.is_dir() and whole.is_dir()) or whole.samefile(copy):
        return False
    return any(
        not os.path.lexists(copy / Path(directory).relative_to(whole) / name)
        for directory, _, names in os.walk(whole)
        for name in names
    )


def sha256_file(path: Path) -> str:
    """Hex sha256 of a file's bytes, read in blocks."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(READ_BLOCK_BYTES):
            digest.update(block)
            progress.made()
    return digest.hexdigest()


def sha256_json(value: Any) -> str:
    """Hex sha256 of a JSON value in canonical form (sorted keys, no spaces)."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_json(path: Path) -> Any:
    """Read a JSON file another stage wrote.

    Raises:
        UserError: the file is missing or not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: file is missing; run `dvc repro`") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: not JSON ({error.msg}); delete it and run `dvc repro`") from None


@contextmanager
def told_in_one_line(path: Path) -> Iterator[None]:
    """Turn an operating-system refusal (disk full, no permission) into a `UserError` naming the path."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        # What was refused is often another file: one that is read, or one inside.
        where = "" if error.filename is None or str(error.filename) == str(path) else f": {error.filename}"
        raise UserError(f"{path}: cannot be written ({reason}{where}); {_remedy(error)}, then rerun") from error


def _remedy(error: OSError) -> str:
    """What the user can do about a refusal."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "free space"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "change permissions or write elsewhere"
    if error.errno == errno.ENOENT:
        return "let nothing remove files while a stage runs"
    return "mend that"


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a path to write a file at; it replaces `path` in one step when the block ends without a fault.

    Raises:
        UserError: the disk refused, or another run is writing the same.
    """
    with _bench(path) as bench:
        made = bench / path.name
        yield made
        sync(made)
        os.replace(made, path)
        sync(path.parent)


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yield an empty directory to fill; it replaces `path` when the block ends without a fault.

    Raises:
        UserError: the disk refused, or another run is writing the same.
    """
    with _bench(path) as bench:
        made = bench / path.name
        made.mkdir()
        yield made
        for each in sorted(made.rglob("*")):
            sync(each)
        sync(made)
        _replace_directory(made, path, bench / "old")
        sync(path.parent)


def _replace_directory(made: Path, path: Path, old: Path) -> None:
    """Put `made` where `path` is; a directory cannot be replaced in one move, so the old one steps aside first."""
    had = path.is_dir()
    if had:
        os.replace(path, old)
    try:
        os.replace(made, path)
    except BaseException:
        if had and not path.exists():
            os.replace(old, path)
        raise


def sync(path: Path) -> None:
    """Have a file's bytes, or a directory's entries, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    progress.made()


def bench_of(path: Path) -> Path:
    """Where the new content of `path` is made, under the same name."""
    return path.with_name(f".{path.name}.partial")


@contextmanager
def _bench(path: Path) -> Iterator[Path]:
    """A directory beside `path` in which its new content is made, by one process at a time; gone afterwards.

    What a killed run left in it is removed first.
    """
    bench, held = bench_of(path), None
    with told_in_one_line(path):
        try:
            with held_back():
                held = hold(bench)
            if held is None:
                raise UserError(f"{path}: another run is writing it now; wait for that to end, then rerun")
            clear(bench)
            yield bench
        finally:
            if held is not None:
                with held_back():
                    clear(bench)
                    leave(bench, held)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file atomically."""
    with atomic_path(path) as aside:
        aside.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically: sorted keys, two spaces, a newline at the end.

    Raises:
        ValueError: the value holds NaN or infinity, which JSON cannot.
    """
    write_text(path, json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n")


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a CSV atomically; a None becomes an empty cell.

    Raises:
        ValueError: a row has a key that is not a column.
    """
    with atomic_path(path) as aside, open(aside, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(columns), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
