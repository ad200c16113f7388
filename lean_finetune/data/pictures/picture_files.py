"""The content of a row's picture, from the row itself or from a file beside it."""

import os
import stat
from pathlib import Path

from lean_finetune.core.atomic_files import find_source
from lean_finetune.data.format.format_base import GivenPicture, RowFault
from lean_finetune.pinning.locate import DataFile
from lean_finetune.pinning.picture_pins import MAX_PICTURE_BYTES


def picture_directory(file: DataFile) -> Path | None:
    """The directory to which the pictures of a file's rows are relative; None for a file on the hub, which has none.

    A temporary experiment runs in a copy without what git ignores, such as pictures: they are in the user's checkout.
    """
    if file.path is None or file.repo_id:
        return None
    return file.path.parent if Path(file.name).is_absolute() else find_source(str(Path(file.name).parent))


def read_picture(given: GivenPicture, directory: Path | None) -> bytes:
    """The content of a picture; `directory` is that of its row's file (`picture_directory`).

    Raises RowFault as `picture_path`, or if the file is missing, not readable, not a regular one, or has more than
    MAX_PICTURE_BYTES.
    """
    if given.data is not None:
        data = given.data
    else:
        path = picture_path(given, directory)
        try:
            # Without waiting: a pipe would wait for a writer. This changes nothing for regular files.
            with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as stream:
                if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                    raise RowFault(f"picture {given.path} is no regular file; copy it into one")
                data = stream.read(MAX_PICTURE_BYTES + 1)
        except OSError as error:
            raise RowFault(
                f"picture {path} cannot be read ({error.strerror}); correct its path, or put it there"
            ) from None
    if len(data) > MAX_PICTURE_BYTES:
        raise RowFault(f"picture {picture_name(given)} has more than {MAX_PICTURE_BYTES >> 20} MiB; make it smaller")
    return data


def picture_path(given: GivenPicture, directory: Path | None) -> Path:
    """The file of a picture that its row names by path.

    Raises RowFault if a relative path leaves `directory`, by `..` or by a link, and for any path if there is none. An
    absolute one is the choice of whoever wrote the rows on this machine.
    """
    assert given.path is not None, "a picture has a path, or its content"
    if "\0" in given.path or not _is_file_name(given.path):
        raise RowFault(f"picture {given.path!r} has a NUL or a lone surrogate in its path; correct it")
    if given.path.startswith("~"):
        raise RowFault(f"picture {given.path}: ~ is not expanded; write the full path")
    if directory is None:
        raise RowFault(
            f"picture {given.path} is named by a row on the hub, where only pictures within rows are read; download "
            "the data set, and name its files"
        )
    if os.path.isabs(given.path):
        return Path(given.path)
    # realpath, unlike resolve, accepts loops of links; opening the file then reports them.
    inside = os.path.realpath(directory)
    if not os.path.realpath(os.path.join(inside, given.path)).startswith(os.path.join(inside, "")):
        raise RowFault(
            f"picture {given.path} is outside of {directory}, the directory of its row's file; write its absolute "
            "path, or copy it there"
        )
    return directory / given.path


def _is_file_name(path: str) -> bool:
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return True


def picture_name(given: GivenPicture) -> str:
    """How messages call a picture."""
    return given.path or "in the row"
