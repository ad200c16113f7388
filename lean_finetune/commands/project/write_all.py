"""Write several files of a directory, or none of them."""

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from lean_finetune.core.atomic_files import rewritten, sync


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

    A file of text None is removed. Of a file that is replaced, line ends, permissions and a link to it stay.
    """
    with tempfile.TemporaryDirectory(prefix=".init.", suffix=".partial", dir=directory) as made:
        for name, text in files.items():
            if text is not None:
                path, target = Path(made) / name, directory / name
                path.parent.mkdir(parents=True, exist_ok=True)
                content, mode = rewritten(target, text) if target.is_file() else (text.encode(), None)
                path.write_bytes(content)
                if mode is not None:
                    path.chmod(mode)
                sync(path)
        for name in files:
            target = directory / name
            if target.is_file():
                undo.callback(_put_back, target, target.read_bytes(), target.stat().st_mode)
                if files[name] is None:
                    target.unlink()
                    continue
                if target.is_symlink():  # The file may be on another disk.
                    _put_back(target.resolve(), (Path(made) / name).read_bytes(), target.stat().st_mode)
                    continue
            else:
                make_directory(target.parent, undo)
                undo.callback(target.unlink, missing_ok=True)
            os.replace(Path(made) / name, target)
    for name, text in links.items():
        make_directory((directory / name).parent, undo)
        os.symlink(text, directory / name)
        undo.callback((directory / name).unlink)


def _put_back(path: Path, content: bytes, mode: int) -> None:
    path = path.resolve()
    aside = path.with_name(f".{path.name}.partial")
    aside.write_bytes(content)
    aside.chmod(stat.S_IMODE(mode))
    sync(aside)
    os.replace(aside, path)


def remove_tree(path: Path) -> None:
    """Remove a directory that need not be there."""
    shutil.rmtree(path, ignore_errors=True)
