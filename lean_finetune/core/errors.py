"""Errors that a user can correct, printed in one line without a traceback."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from cuda_memory.errors import UsageFault as UsageFault
from cuda_memory.errors import UserError, escaped
from lean_finetune.core import signals
from lean_finetune.core.dvc_leftovers import restore_metrics

# On import, bitsandbytes warns about an optional inference kernel that no stage uses. Every entry imports this module
# before bitsandbytes.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
LONGEST_LINE = 600
"""Characters of a message that quotes data."""
LONGEST_VALUE = 80
"""Characters of a value in a message."""


class DoesNotFit(UserError):
    """The run needs more memory than there is: by the prediction, by what is free, or because memory ran out."""

    exit_code = 3


def shortened(text: str, most: int = LONGEST_VALUE) -> str:
    """A value for a message, of at most `most` characters."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def one_line(text: str) -> str:
    """A text as one line of at most LONGEST_LINE characters, escaped."""
    return shortened(escaped(" ".join(text[: 2 * LONGEST_LINE].split())), LONGEST_LINE)


@contextmanager
def exit_on_signal() -> Iterator[None]:
    """Exit at once at a stop signal, with the line of a stopped stage. The block must not need any cleanup.

    For imports of PyTorch: an exception in a module that C++ code imports can abort the process.
    """

    def end(number: int, _: FrameType | None) -> None:
        restore_metrics()
        ending = signals.Interrupted(number)
        os.write(2, f"{stopped_line(ending)}\n".encode())
        os._exit(ending.exit_code)

    with signals.handled_by(end):
        yield


def stopped_line(ending: signals.Interrupted) -> str:
    """The line of a stage that a signal stopped."""
    return f"stopped by {ending.name}: no output is half-written; the same command starts again"
