"""Errors for users, one line each, and the command class that prints them."""

import errno
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from cuda_memory.terminal import OutputFault, echo, echo_json, guarded_streams, visible_line

REMEDIES: Mapping[int | None, str] = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "free space"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "change permissions or write elsewhere"),
    errno.ENOENT: "do not remove files while a stage runs",
}
"""Remedies of errors that writing raises."""


MOST_CHARACTERS = 4000
"""Of a message, which may quote a value of any size."""


class UserError(Exception):
    """An error in the input, the parameters or the machine.

    The message is one line: the dotted parameter or file:line, the rule, the value got, the remedy.
    """

    exit_code = 1
    """Of the process that ends with this error."""
    answer: Mapping[str, Any] = {}
    """What is known all the same, which `--json` prints with the message."""

    def __init__(self, message: str, *details: str):
        """`details` are further lines for what does not fit in one.

        All become lines that a terminal can show: they quote names, values and errors of other libraries.
        """
        line = visible_line(message[:MOST_CHARACTERS])
        super().__init__(line if len(line) <= MOST_CHARACTERS else f"{line[: MOST_CHARACTERS - 3]}...")
        self.details = tuple(map(visible_line, details))

    @classmethod
    def of_code(cls, exit_code: int, message: str, *details: str) -> "UserError":
        """An error with the exit code of another one."""
        error = UserError(message, *details)
        error.exit_code = exit_code
        return error


class UsageFault(UserError):
    """An option or argument of the command line has a value that cannot be."""

    exit_code = 2  # As for errors that click finds.


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turn an `OSError` (disk full, no permission) into a `UserError` that names the path."""
    try:
        yield
    except OSError as error:
        reason, remedy = error.strerror or str(error), REMEDIES.get(error.errno, "correct that")
        # The error is often about another file: one that is read, or one inside the directory.
        where = "" if error.filename is None or str(error.filename) == str(path) else f": {error.filename}"
        raise UserError(f"{path}: cannot be written ({reason}{where}); {remedy}, then rerun") from error


def write_whole(path: Path, text: str) -> None:
    """Write a UTF-8 text file that is complete or, after an error, unchanged.

    Raises:
        UserError: it cannot be written.
    """
    temporary = path.with_name(f".{os.getpid()}.partial")
    with write_errors(path):
        try:
            with temporary.open("w", encoding="utf-8", newline="\n") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


# The command that prints them.


Report = Callable[[int, str], None]
"""Called with the exit code and the line of an error, after the line was printed."""


@contextmanager
def one_line_usage_errors(ctx: click.Context, report: Report | None = None) -> Iterator[None]:
    """Print an error in the command line as one line on standard error and exit with code 2."""
    try:
        yield
    except click.UsageError as error:
        message = f"{visible_line(error.format_message()).removesuffix('.')}; see `{ctx.command_path} --help`"
        echo(f"error: {message}", err=True)
        if report is not None:
            report(UsageFault.exit_code, message)
        ctx.exit(UsageFault.exit_code)


@contextmanager
def guarded_output() -> Iterator[None]:
    """Guard the streams of a command, and exit with one line if standard output cannot be written."""
    with guarded_streams():
        try:
            yield
        except OutputFault as fault:
            echo(f"error: output cannot be written ({fault.strerror}); free space, or write elsewhere", err=True)
            sys.exit(1)


class OneLineCommand(click.Command):
    """A click command that prints a `UserError` as one line on standard error and exits with its code.

    With --json, the error is one JSON object on standard output, too, so that a script always finds one there.
    """

    wants_json = False
    """Whether this run of the command prints JSON."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the command line. Exit with 2 and one line if it is wrong."""
        self.wants_json = "--json" in args and any(option.name == "as_json" for option in self.params)
        with one_line_usage_errors(ctx, self.report):
            return super().parse_args(ctx, args)

    def remedy(self, message: str) -> str:
        """What to append to the message of an error."""
        return ""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command and exit. A terminal obeys nothing that it prints."""
        with guarded_output():
            return super().main(*args, **kwargs)

    def report(
        self, exit_code: int, message: str, details: Sequence[str] = (), answer: Mapping[str, Any] | None = None
    ) -> None:
        """Print an error as JSON, with what is known all the same, if this run of the command prints JSON."""
        if self.wants_json:
            self.echo_report({**(answer or {}), "error": message, "details": list(details), "exit_code": exit_code})

    def echo_report(self, error: Mapping[str, Any]) -> None:
        """Print an error as JSON."""
        echo_json(error)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. Exit with the code of a `UserError`, or with 1 if memory ran out."""
        try:
            return super().invoke(ctx)
        except UserError as error:
            message = f"{error}{self.remedy(str(error))}"
            for line in (f"error: {message}", *(f"  {each}" for each in error.details)):
                echo(line, err=True)
            self.report(error.exit_code, message, error.details, error.answer)
            sys.exit(error.exit_code)
        except MemoryError as error:  # Of Python, NumPy, Arrow or safetensors.
            reason = visible_line(str(error)) or "no reason given"
            message = (
                f"this process got no more of the host's memory ({reason}); free some, or raise the limit (ulimit -v), "
                "then rerun"
            )
            echo(f"error: {message}", err=True)
            self.report(1, message)
            sys.exit(1)
