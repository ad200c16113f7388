"""Ignore write errors on stdout and stderr, so that a full log disk or a closed pipe never ends a training run."""

import sys
from contextlib import suppress
from typing import Any, TextIO, cast

WRITE_ERRORS = (OSError, ValueError)
"""A ValueError is raised by a closed stream, and by one that cannot encode a character."""


class BestEffortStream:
    """A text stream that ignores write errors, as the handlers of `logging` do.

    Output files are written elsewhere, and their write errors do end the run.
    """

    def __init__(self, stream: TextIO | None):
        """Write to `stream`; None if it was closed before the process started."""
        self._stream = stream

    def write(self, text: str) -> int:
        """Try to write; always return the number of characters."""
        if self._stream is not None:
            with suppress(*WRITE_ERRORS):
                self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Try to flush."""
        if self._stream is not None:
            with suppress(*WRITE_ERRORS):
                self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        """Delegate to the stream: a progress bar inspects its terminal."""
        return getattr(self._stream, name)


def ignore_output_errors() -> None:
    """Replace stdout and stderr for the rest of the process, including the interpreter's last flush."""
    sys.stdout, sys.stderr = cast(TextIO, BestEffortStream(sys.stdout)), cast(TextIO, BestEffortStream(sys.stderr))
