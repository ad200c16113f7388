"""The project's trained model, loaded once for all windows: a process of `lean-finetune chat --json`."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from lean_finetune.core.errors import UserError
from lean_finetune.page.project.ended import fault_of
from lean_finetune.page.project.project_run import read_state

MODEL = Path("data/tuned")
LAST = ("answer", "fault")
"""Events that end an answer."""
CONFIGS = ("adapter_config.json", "config.json")


Event = Mapping[str, Any]
Answer = Generator[Event, None, None]


class ChatModel:
    """Answers conversations, one at a time. A new process starts for other images, or another model."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        """Held while an answer is made."""
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._key: Any = None
        self._asks: str | None = None
        """Who is answered now."""
        self._is_closed = False

    def answer(
        self, messages: Sequence[Mapping[str, str]], images: Sequence[str], who: str
    ) -> Generator[Any, None, None]:
        """The events of `chat --json` for a conversation, which ends with a question; first `ready`.

        Raises:
            UserError: there is no model, or it cannot be loaded or does not fit the free memory.
        """
        with self._turn:
            yield self._ready(images)
            self._write({"messages": list(messages)})
            event: Event = {}
            self._asks = who
            try:
                while event.get("event") not in LAST:
                    event = self._read()
                    yield event
            finally:
                if event.get("event") not in LAST:  # The window was closed: nothing of it may be left for the next one.
                    self.stop(who)
                    while self._process is not None and self._read()["event"] not in LAST:
                        continue
                self._asks = None

    def stop(self, who: str) -> None:
        """Stop the answer to `who`, if it is being made."""
        process = self._process
        if self._asks == who and process is not None and process.poll() is None:
            process.send_signal(signal.SIGINT)

    def close(self) -> None:
        """End the process, and let none start: the page ends."""
        self._is_closed = True
        self.end()

    def end(self) -> None:
        """End the process, so that its memory is free."""
        process, errors = self._process, self._errors
        self._process = self._errors = self._key = None
        if process is not None:
            process.kill()
            process.wait()
        streams = (errors, *((process.stdin, process.stdout) if process is not None else ()))
        for stream in streams:
            if stream is not None:
                with suppress(OSError):  # What was written and not read is of no use.
                    stream.close()

    def _ready(self, images: Sequence[str]) -> Event:
        """Have a process that has loaded today's model with these images; its first event."""
        if read_state().is_running:
            raise UserError("this project's run goes on; chat when it has ended, as both need the memory")
        key = (tuple(images), _version())
        if self._process is None or self._process.poll() is not None or key != self._key:
            self.end()
            self._start(images)
            self._first, self._key = self._read(), key
        return self._first

    def _start(self, images: Sequence[str]) -> None:
        if not all(map(os.path.isfile, images)):
            raise UserError("a dropped image is not kept any more; drop it again")
        self._errors = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lean_finetune", "chat", "--json", *(f"--image={image}" for image in images)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )
        if self._is_closed:
            self._process.kill()

    def _write(self, value: Any) -> None:
        process = self._process
        try:
            if process is None or process.stdin is None:
                raise self._ended()
            process.stdin.write(json.dumps(value).encode() + b"\n")
            process.stdin.flush()
        except (OSError, ValueError):
            raise self._ended() from None

    def _read(self) -> Event:
        """The next event. Raises UserError if the process ends."""
        process = self._process
        try:
            line = b"" if process is None or process.stdout is None else process.stdout.readline()
            event = json.loads(line) if line else {"event": "error"}
        except ValueError:  # The pipe was closed.
            event = {"event": "error"}
        if event["event"] == "error":
            raise self._ended()
        return event

    def _ended(self) -> UserError:
        """Why the process ended; nothing of it is left."""
        process, errors = self._process, self._errors
        if process is None or errors is None:
            return UserError("the model was unloaded meanwhile; ask again")
        code = process.wait()
        errors.seek(0)
        fault = fault_of(code, errors.read().decode(errors="replace"))
        self.end()
        return UserError(fault)


def _version() -> tuple[Any, ...]:
    """What differs between two trained models here.

    Raises:
        UserError: there is none.
    """
    found = [(name, os.stat(MODEL / name)) for name in CONFIGS if (MODEL / name).is_file()]
    if not found:
        raise UserError(f"here is no trained model yet ({MODEL}); Run trains one")
    return tuple((name, status.st_mtime_ns, status.st_ino) for name, status in found)
