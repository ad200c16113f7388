"""Write several files of a directory, or none of them."""

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from lean_finetune.core.atomic_files import sync


@contextmanager
def undone_after_fault(directory: Path) -> Iterator[ExitStack]:
    """Make a directory, and yield the stack of what undoes the changes in it if the block raises an exception."""
    with ExitStack() as undo:
        make_directory(directory, undo)
        yield undo
        undo.pop_all()


def make_directory(path: Path, undo: ExitStack) -> None:
    """Make a directory and its parents, where they are missing."""
    if not path.is_dir():
        make_directory(path.parent, undo)
        path.mkdir()
        undo.callback(path.rmdir)


def write_all(directory: Path, files: Mapping[str, str | None], links: Mapping[str, str], undo: ExitStack) -> None:
    """Write files and links by their paths below a directory: all aside first, then each is renamed.

    A file of text None is removed.
    """
    with tempfile.TemporaryDirectory(prefix=".init.", suffix=".partial", dir=directory) as made:
        for name, text in files.items():
            if text is not None:
                path = Path(made) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
                sync(path)
        for name in files:
            target = directory / name
            if target.is_file():
                undo.callback(_put_back, target, target.read_bytes())
                if files[name] is None:
                    target.unlink()
                    continue
            else:
                make_directory(target.parent, undo)
                undo.callback(target.unlink, missing_ok=True)
            os.replace(Path(made) / name, target)
    for name, text in links.items():
        make_directory((directory / name).parent, undo)
        os.symlink(text, directory / name)
        undo.callback((directory / name).unlink)


def _put_back(path: Path, content: bytes) -> None:
    aside = path.with_name(f".{path.name}.partial")
    aside.write_bytes(content)
    os.replace(aside, path)


def remove_tree(path: Path) -> None:
    """Remove a directory that need not be there."""
    shutil.rmtree(path, ignore_errors=True)
