"""Names of files that a file lists, and links: both can lead out of the directory that they belong to."""

import os
import shutil
from pathlib import Path, PurePath
from typing import TypeGuard

from lean_finetune.core.errors import UserError

LONGEST_PART = 255
"""Bytes of a file's or a directory's name; the limit of common file systems."""


def is_name_inside(name: object) -> TypeGuard[str]:
    """Whether a value names something below a directory, such as `stages/train.py`: relative, and without `..`.

    Links below that directory are not looked at.
    """
    if not isinstance(name, str) or "\0" in name:
        return False
    path = PurePath(name)
    if path.anchor or path.as_posix() != name or name == "." or ".." in path.parts:
        return False
    try:
        return max(len(part.encode()) for part in path.parts) <= LONGEST_PART
    except UnicodeEncodeError:  # A lone surrogate, which JSON can have.
        return False


def refuse_link_out(directory: Path, path: Path) -> None:
    """Refuse to write a path to which a link leads out of a directory, or a link to nothing.

    Links inside are followed: the directory itself may be one, too.

    Raises:
        UserError: naming the link's target.
    """
    real = Path(os.path.realpath(path))
    if not real.is_relative_to(os.path.realpath(directory)):
        where = "this directory" if directory == Path() else directory
        raise UserError(
            f"{path}: a link leads to {real}, outside of {where}, where nothing is written; replace the link by what "
            "it leads to"
        )
    if path.is_symlink() and not path.exists():
        raise UserError(f"{path}: is a link to {os.readlink(path)}, which does not exist; remove it")


def copy_below(source: Path, name: str, target: Path) -> None:
    """Copy the file `name` below one directory to the same place below another."""
    (target / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source / name, target / name)
