"""A click command whose errors are one line on standard error."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from cuda_memory.errors import UsageFault, UserError, escaped


@contextmanager
def one_line_usage_errors(ctx: click.Context) -> Iterator[None]:
    """Print an error in the command line as one line on standard error and exit with code 2."""
    try:
        yield
    except click.UsageError as error:
        message = escaped(" ".join(error.format_message().split()).removesuffix("."))
        click.echo(f"error: {message}; see `{ctx.command_path} --help`", err=True)
        ctx.exit(UsageFault.exit_code)


class OneLineCommand(click.Command):
    """A click command that prints a `UserError` as one line on standard error and exits with its code."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the command line. Exit with 2 and one line if it is wrong."""
        with one_line_usage_errors(ctx):
            return super().parse_args(ctx, args)

    def remedy(self, message: str) -> str:
        """What to append to the message of an error."""
        return ""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. Exit with the code of a `UserError`, or with 1 if memory ran out."""
        try:
            return super().invoke(ctx)
        except UserError as error:
            message = escaped(" ".join(str(error).split()))
            click.echo(f"error: {message}{self.remedy(message)}", err=True)
            for line in error.details:
                click.echo(f"  {line}", err=True)
            sys.exit(error.exit_code)
        except MemoryError as error:  # Of Python, NumPy, Arrow or safetensors.
            reason = escaped(" ".join(str(error).split())) or "no reason given"
            click.echo(
                f"error: this process got no more of the host's memory ({reason}); free some, or raise the limit "
                "(ulimit -v), then rerun",
                err=True,
            )
            sys.exit(1)
