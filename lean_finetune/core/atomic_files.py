"""Atomic writes of files and directories: a killed run or a full disk never leaves partial output."""

import csv
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cuda_memory.errors import UserError, write_errors
from cuda_memory.user_paths import user_path
from lean_finetune.core import progress
from lean_finetune.core.file_locks import clear, lock_directory, unlock_directory
from lean_finetune.core.regular_files import NotRegular, open_regular, read_regular
from lean_finetune.core.signals import defer_signals
from lean_finetune.core.systems import flush_to_disk

READ_BLOCK_BYTES = 1 << 20
FIGURES = "figures.json"
"""A stage's file of all its figures, in its output directory. metrics/ has only those that compare runs."""


def repo_root() -> Path:
    """The user's checkout, also in `--temp` and queued runs, whose working directory is a copy of it."""
    return Path(os.environ.get("DVC_ROOT", "."))


def find_source(path: str, parameter: str) -> Path:
    """Resolve a local path of params.yaml in the working directory or in the user's checkout.

    Raises UserError, which names the parameter, if the system cannot look it up.

    Temporary and queued experiments run in a copy without the files that git does not track. A directory with some
    untracked files is read from the checkout, where it is complete.
    """
    user_path(path, parameter)
    here, there = Path(path), repo_root() / path
    if here.is_absolute() or (here.exists() and not _has_more_files(there, here)):
        return here
    return there


def _has_more_files(original: Path, copy: Path) -> bool:
    """Whether a copy of a directory lacks some of its files."""
    if not (copy.is_dir() and original.is_dir()) or original.samefile(copy):
        return False
    return any(
        not os.path.lexists(copy / Path(directory).relative_to(original) / name)
        for directory, _, names in os.walk(original)
        for name in names
    )


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a regular file. Raises OSError, of a pipe or a directory too."""
    return file_digest(path, hashlib.sha256())


def file_digest(path: Path, digest: "hashlib._Hash") -> str:
    """Hex digest of what `digest` has seen and a regular file. Reports progress. Raises OSError."""
    with open_regular(path) as file:
        while block := file.read(READ_BLOCK_BYTES):
            digest.update(block)
            progress.report()
    return digest.hexdigest()


def sha256_json(value: Any) -> str:
    """Hex SHA-256 of a JSON value in canonical form: sorted keys, no spaces."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_json(path: Path) -> Any:
    """Read a JSON file that another stage wrote. Raises UserError if it is missing, no regular file, or not JSON."""
    try:
        return json.loads(read_regular(path).decode("utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: file is missing; run `dvc repro`") from None
    except NotRegular:
        raise UserError(f"{path}: is no regular file; remove it and run `dvc repro`") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: not JSON ({error.msg}); delete it and run `dvc repro`") from None
    except (UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error}); delete it and run `dvc repro`") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); delete it and run `dvc repro`") from None


SEAL = "sha256"
"""Key of a sealed JSON file: the hash of its other keys."""


def write_sealed(path: Path, value: Mapping[str, Any]) -> None:
    """`write_json` of what another stage reads, with its own hash. `read_sealed` reads it."""
    content = json.loads(json.dumps(value, allow_nan=False))
    write_json(path, {**content, SEAL: sha256_json(content)})


def read_sealed(path: Path) -> dict[str, Any]:
    """The content that `write_sealed` wrote. Raises UserError as `read_json`, or if it was changed since."""
    content = read_json(path)
    seal = content.pop(SEAL, None) if isinstance(content, dict) else None
    if seal is None:
        raise UserError(f"{path}: has no hash of its content, so no stage wrote it; delete it and run `dvc repro`")
    if seal != sha256_json(content):
        raise UserError(f"{path}: differs from its hash: it was changed; delete it and run `dvc repro`")
    return dict(content)


TABLES = "tables.json"
"""The hashes of the tables in a stage's directory, which cannot have their own: other programs read them."""


def _table_sums(directory: Path) -> dict[str, str]:
    return {path.name: sha256_file(path) for path in sorted(directory.iterdir()) if path.suffix in (".csv", ".jsonl")}


def seal_tables(directory: Path) -> None:
    """Write the hashes of the CSV and JSON-lines files in a directory."""
    write_sealed(directory / TABLES, _table_sums(directory))


def check_tables(directory: Path) -> None:
    """Compare the CSV and JSON-lines files in a directory with their hashes.

    Raises UserError if one is missing, no regular file, or was changed.
    """
    for name, digest in read_sealed(directory / TABLES).items():
        path = directory / name
        try:
            if sha256_file(path) != digest:
                raise UserError(f"{path}: differs from its hash in {TABLES}: it was changed; run `dvc repro` again")
        except FileNotFoundError:
            raise UserError(f"{path}: file is missing; run `dvc repro`") from None
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror}); remove it and run `dvc repro`") from None


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path for a file, which replaces `path` when the block ends without an exception.

    Raises UserError if writing failed, or another run is writing the same path.
    """
    with _temporary(path) as temporary:
        made = temporary / path.name
        yield made
        sync(made)
        os.replace(made, path)
        sync(path.parent)


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yield a temporary directory, which replaces `path` when the block ends without an exception.

    Raises UserError if writing failed, or another run is writing the same path.
    """
    with _temporary(path) as temporary:
        made = temporary / path.name
        made.mkdir()
        yield made
        for each in sorted(made.rglob("*")):
            sync(each)
        sync(made)
        _replace_directory(made, path, temporary / "old")
        sync(path.parent)


def _replace_directory(made: Path, path: Path, old: Path) -> None:
    """Replace the directory `path` by `made`. This takes two renames, because a rename cannot replace a directory."""
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
    """Flush a file's bytes or a directory's entries to the disk."""
    flush_to_disk(path)
    progress.report()


def link_or_copy(source: Path, target: Path) -> None:
    """Hard-link a file, so that it stays complete where it is; copy it where links are impossible."""
    try:
        os.link(source, target)
    except OSError:  # Another file system, or one without links.
        shutil.copyfile(source, target)


def partial_directory(path: Path) -> Path:
    """The directory in which the new content of `path` is written, under the same name."""
    return path.with_name(f".{path.name}.partial")


@contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """A locked temporary directory next to `path` for its new content. Leftovers of a killed run are removed first."""
    temporary, lock = partial_directory(path), None
    with write_errors(path):
        try:
            with defer_signals():
                lock = lock_directory(temporary)
            if lock is None:
                raise UserError(f"{path}: another run is writing it; wait until that ends, then rerun")
            clear(temporary)
            yield temporary
        finally:
            if lock is not None:
                with defer_signals():
                    clear(temporary)
                    unlock_directory(temporary, lock)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def rewrite_text(path: Path, text: str) -> None:
    """Write a user's UTF-8 text file atomically: its line ends, its permissions and a link to it stay."""
    if not path.is_file():
        return write_text(path, text)
    real = path.resolve()
    content, mode = rewritten(real, text)
    with atomic_path(real) as temporary:
        temporary.write_bytes(content)
        temporary.chmod(mode)


def rewritten(path: Path, text: str) -> tuple[bytes, int]:
    """The content and the permissions with which a text replaces a file: the line ends are those of its first line.

    Surrogates in the text are bytes of the file that are not UTF-8.
    """
    with path.open("rb") as file:
        ends = "\r\n" if file.readline().endswith(b"\r\n") else "\n"
    return text.replace("\n", ends).encode("utf-8", "surrogateescape"), stat.S_IMODE(path.stat().st_mode)


def write_json(path: Path, value: Any, *, sort_keys: bool = True) -> None:
    """Write JSON atomically, with sorted keys (unless their order matters to readers) and an indent of two.

    Raises ValueError if the value contains NaN or infinity.
    """
    write_text(path, json.dumps(value, indent=2, sort_keys=sort_keys, ensure_ascii=False, allow_nan=False) + "\n")


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a CSV atomically. None becomes an empty cell. Raises ValueError if a row has a key that is not a column."""
    with atomic_path(path) as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(columns), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
