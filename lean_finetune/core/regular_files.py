"""Open regular files alone: a pipe in place of a file waits for a writer, and a device may never end."""

import errno
import io
import os
import stat
from pathlib import Path


class NotRegular(OSError):
    """A path is that of a pipe, a device or a socket."""

    def __init__(self, path: Path):
        super().__init__(errno.EINVAL, "is no regular file", str(path))


def open_regular(path: Path) -> io.FileIO:
    """Open a regular file, or a link to one, for reading, unbuffered.

    Raises:
        NotRegular: it is something else.
        OSError: it cannot be opened, or is a directory.
    """
    # Without waiting for a pipe's writer; this changes nothing for regular files.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
    try:
        handle = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ENXIO:  # A socket.
            raise NotRegular(path) from None
        raise
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise NotRegular(path)
    return io.FileIO(handle, "rb")


def read_regular(path: Path, most: int = -1) -> bytes:
    """The content of a regular file, up to `most` bytes of it. Raises as `open_regular`."""
    with open_regular(path) as file:
        parts = list[bytes]()  # A read returns at most 2 GiB.
        while most and (part := file.read(most)):
            parts.append(part)
            most -= len(part) if most > 0 else 0
        return b"".join(parts)


def refuse_irregular(path: Path) -> None:
    """Raise as `open_regular`, for libraries that open a path themselves."""
    open_regular(path).close()
