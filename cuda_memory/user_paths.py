"""Paths that a user wrote, on the command line or as a parameter."""

import os
import shlex
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from cuda_memory.errors import UsageFault, UserError

SHOWN = 80
"""Characters of a path in a message."""


def user_path(given: str | os.PathLike[str], name: str) -> Path:
    """The path that a user gave for the option or parameter `name`, with ~ as the home directory.

    It may not exist. What exists is a file, a directory or a pipe.

    Raises:
        UserError: the system cannot look it up: it is too long, a loop of links, or in a directory without rights.
    """
    text = os.fspath(given)
    shown = repr(text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}...")
    try:
        path = Path(text).expanduser()
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return path
    except RuntimeError:
        raise UserError(f"{name}: there is no such home directory; got {shown}; write the full path") from None
    except ValueError:  # A character that no name can have.
        raise UserError(f"{name}: must be a path; got {shown}; correct it") from None
    except OSError as error:
        raise UserError(f"{name}: cannot be reached ({error.strerror}); got {shown}; correct the path") from None
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISFIFO(mode)):
        raise UserError(f"{name}: must be a file or a directory; got {shown}, a device; name another")
    return path


def text_path(given: str | os.PathLike[str], name: str) -> Path:
    """As `user_path`, for a path that is written into other files, which are UTF-8."""
    path = user_path(given, name)
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise UsageFault(f"{name}: must be a name in UTF-8; got {str(path)!r}; rename it") from None
    return path


def output_file(path: Path, name: str) -> Path:
    """The file that replaces `path`: what a link leads to.

    Raises:
        UsageFault: that is no regular file, or its directory cannot be written.
    """
    real = Path(os.path.realpath(path))
    above = next(each for each in real.parents if os.path.lexists(each))
    if not (above.is_dir() and os.access(above, os.W_OK)):
        why = "in a directory without rights to write" if above.is_dir() else f"below {str(above)!r}, a file"
        raise UsageFault(f"{name}: must be in a directory that can be written; got {str(path)!r}, {why}; name another")
    if os.path.lexists(real) and not os.path.isfile(real):
        kind = "a directory" if os.path.isdir(real) else "no regular file"
        raise UsageFault(f"{name}: must be the name of a file; got {str(path)!r}, which is {kind}; name another")
    return real


def no_option(path: Path) -> str:
    """A path as an argument that no program takes for an option."""
    return f"./{path}" if str(path).startswith("-") else str(path)


def shell_line(words: Iterable[str]) -> str:
    """A command line for a shell. Characters that a terminal does not show are codes, which bash and zsh read."""
    return " ".join(shlex.quote(word) if word.isprintable() else f"$'{_coded(word)}'" for word in words)


def _coded(word: str) -> str:
    def code(one: str) -> str:
        if one.isprintable() and one not in "'\\":
            return one
        return f"\\x{ord(one):02x}" if one.isascii() else f"\\U{ord(one):08x}"

    return "".join(map(code, word))


class UserPath(click.Path):
    """The type of options and arguments that are paths."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path. Raises click.UsageError if the system cannot look it up."""
        name = "" if param is None else param.opts[0] if isinstance(param, click.Option) else param.human_readable_name
        try:
            return user_path(value, name)
        except UserError as error:
            raise click.UsageError(str(error)) from None


PATH = UserPath()
