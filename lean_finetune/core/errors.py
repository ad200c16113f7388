"""Faults a user can mend, and the one line in which they are told."""

import logging
import sys
from typing import Any

import click

from lean_finetune.core import signals
from lean_finetune.core.dvc_leftovers import override_remedy, restore_metrics

# While it is imported, bitsandbytes tells of an optional inference kernel that no stage uses. Every entry imports this
# module before any that brings bitsandbytes, so it is silenced in time.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


class UserError(Exception):
    """A fault in the input, parameters or machine.

    The message is one line: the dotted parameter or file:line, the rule, the value got, the remedy.
    """

    def __init__(self, message: str, *details: str):
        """Say `message`, and below it a few lines where one cannot hold what the user needs."""
        super().__init__(message)
        self.details = details


class StageCommand(click.Command):
    """A click command that ends a `UserError` as one line on standard error and exit code 1."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """As click's; one that failed leaves metrics as they were, one that a signal ended is gone soon after.

        Raises:
            SystemExit: with the exit code.
        """
        try:
            return super().main(*args, **kwargs)
        except BaseException as ending:
            code = ending.code if isinstance(ending, SystemExit) else 1
            if code:
                restore_metrics()
            if isinstance(code, int) and code > signals.FIRST_OF_SIGNALS:
                signals.end_soon(code)
            raise

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command.

        Raises:
            SystemExit: with code 1 after a `UserError` was printed, with 128 + its number after a signal was.
        """
        try:
            with signals.raised():
                return super().invoke(ctx)
        except signals.Interrupted as ending:
            click.echo(f"stopped by {ending.name}: no output is half-written; the same command starts again", err=True)
            sys.exit(ending.exit_code)
        except UserError as error:
            message = " ".join(str(error).split())
            click.echo(f"error: {message}{override_remedy(message)}", err=True)
            for line in error.details:
                click.echo(f"  {line}", err=True)
            sys.exit(1)
