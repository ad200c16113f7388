"""The click command of every stage: errors in one line, signals, metrics restored after a failure."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from lean_finetune.core import signals
from lean_finetune.core.dvc_leftovers import override_remedy, remove_outdated_metrics, restore_metrics
from lean_finetune.core.errors import UsageFault, UserError, escaped, stopped_line


@contextmanager
def one_line_usage_errors(ctx: click.Context) -> Iterator[None]:
    """Print an error in the command line as one line on standard error and exit with code 2."""
    try:
        yield
    except click.UsageError as error:
        message = escaped(" ".join(error.format_message().split()).removesuffix("."))
        click.echo(f"error: {message}; see `{ctx.command_path} --help`", err=True)
        ctx.exit(UsageFault.exit_code)


class StageCommand(click.Command):
    """A click command that prints a `UserError` as one line on standard error and exits with its code."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command and exit, without tearing modules down. A failed one restores the metrics.

        One that succeeded removes metrics that its results made outdated, where DVC would commit them.
        """
        try:
            return super().main(*args, **kwargs)
        except BaseException as error:
            code = error.code if isinstance(error, SystemExit) else 1
            if code:
                restore_metrics()
            else:
                remove_outdated_metrics()
            if isinstance(error, SystemExit) and isinstance(code, int | None):
                signals.end_soon(code or 0)
            raise

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the command line. Exit with 2 and one line if it is wrong."""
        with one_line_usage_errors(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. Exit with the code of a `UserError`, and with 128 + its number after a signal."""
        try:
            with signals.raised():
                return super().invoke(ctx)
        except signals.Interrupted as ending:
            click.echo(stopped_line(ending), err=True)
            sys.exit(ending.exit_code)
        except UserError as error:
            message = escaped(" ".join(str(error).split()))
            click.echo(f"error: {message}{override_remedy(message)}", err=True)
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
