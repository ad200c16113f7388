"""The click command of every stage: errors in one line, signals, metrics restored after a failure."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from cuda_memory.command import OneLineCommand
from lean_finetune.core import signals
from lean_finetune.core.dvc_leftovers import override_remedy, remove_outdated_metrics, restore_metrics
from lean_finetune.core.errors import stopped_line


@contextmanager
def one_line_after_signals() -> Iterator[None]:
    """Print one line and exit with 128 + its number after a signal that stops this process."""
    try:
        with signals.raised():
            yield
    except signals.Interrupted as ending:
        click.echo(stopped_line(ending), err=True)
        sys.exit(ending.exit_code)


class StageCommand(OneLineCommand):
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

    def remedy(self, message: str) -> str:
        """How to undo overrides that DVC left in params.yaml."""
        return override_remedy(message)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. Exit with the code of a `UserError`, and with 128 + its number after a signal."""
        with one_line_after_signals():
            return super().invoke(ctx)
