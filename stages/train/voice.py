"""What training says and cannot be written is lost, and not the hours of training before it."""

import sys
from contextlib import suppress
from typing import Any, TextIO, cast


class Voice:
    """A stream without its refusals: a full disk under a log, a reader that has gone. So do the handlers of `logging`.

    What a run *makes* is written elsewhere, and every refusal of that is told.
    """

    def __init__(self, stream: TextIO):
        """Write to `stream`."""
        self._stream = stream

    def write(self, text: str) -> int:
        """Write, if that can be; the number of characters, which tells nothing."""
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Hand what was written to the system, if that can be."""
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        """As the stream has it: what a progress bar asks about its terminal."""
        return getattr(self._stream, name)


def never_refused() -> None:
    """Let nothing that this process cannot say end it, to the last flush, which is the interpreter's."""
    sys.stdout, sys.stderr = cast(TextIO, Voice(sys.stdout)), cast(TextIO, Voice(sys.stderr))
