"""What training says and cannot be written is lost, and not the hours of training before it."""

import sys
from contextlib import suppress
from typing import Any, TextIO, cast

REFUSALS = (OSError, ValueError)
"""The latter of a stream that was closed, or that has no code for a character."""


class Voice:
    """A stream without its refusals: a full disk under a log, a reader that has gone. So do the handlers of `logging`.

    What a run *makes* is written elsewhere, and every refusal of that is told.
    """

    def __init__(self, stream: TextIO | None):
        """Write to `stream`; None is one that was closed before the process began."""
        self._stream = stream

    def write(self, text: str) -> int:
        """Write, if that can be; the number of characters, which tells nothing."""
        if self._stream is not None:
            with suppress(*REFUSALS):
                self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Hand what was written to the system, if that can be."""
        if self._stream is not None:
            with suppress(*REFUSALS):
                self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        """As the stream has it: what a progress bar asks about its terminal."""
        return getattr(self._stream, name)


def never_refused() -> None:
    """Let nothing that this process cannot say end it, to the last flush, which is the interpreter's."""
    sys.stdout, sys.stderr = cast(TextIO, Voice(sys.stdout)), cast(TextIO, Voice(sys.stderr))
