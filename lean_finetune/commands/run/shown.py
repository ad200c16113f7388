"""What `run` prints: lines for a person, or events as JSON lines."""

import os
import sys
from types import TracebackType
from typing import Any, Self

from cuda_memory.terminal import echo, json_text


class Shown:
    """Standard output of `run`: the text of each event, or with --json one JSON object in a line.

    With --json, what stages print to standard output goes to standard error in the block.
    """

    def __init__(self, *, as_json: bool):
        self.as_json = as_json
        self._out: int | None = None

    def __enter__(self) -> Self:
        """Keep standard output for the events."""
        if self.as_json:
            sys.stdout.flush()
            self._out = os.dup(1)
            os.dup2(2, 1)
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        """Put standard output back."""
        if self._out is not None:
            sys.stdout.flush()
            os.dup2(self._out, 1)
            os.close(self._out)
            self._out = None

    def event(self, name: str, *lines: str, **figures: Any) -> None:
        """Print an event: its lines, or its name and figures."""
        if self._out is not None:
            text = json_text({"event": name, **figures})
            os.write(self._out, f"{text}\n".encode())
            return
        for line in lines:
            echo(line)
