"""Run a command of `lean-finetune` for a view: a process of its own, with limits, whose output is the answer.

So a page shows what the command computes, a crash ends one request only, and visitors share no memory.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lean_finetune.core.errors import UserError
from lean_finetune.page.limits import Limits
from lean_finetune.page.project.ended import fault_of

PASSED_ON = ("LANG", "LC_ALL", "PATH", "PYTHONPATH", "SYSTEMROOT", "HF_HUB_OFFLINE", "HF_ENDPOINT", "SSL_CERT_FILE")
"""Variables that a command of a hosted page sees. Others may be secrets, such as tokens."""
MOST_OUTPUT_BYTES = 64 << 20


_running: set[subprocess.Popen[bytes]] = set()
"""Commands that have not ended."""
_ending = threading.Event()
"""Set when the page ends."""
LONGEST_FIELD, MOST_WORDS = 500, 50
"""Characters of a field of one line, and fields of a command."""


def option_words(options: Mapping[str, str], sets: str | None) -> list[str]:
    """The words of a command for the fields that are filled in; `sets` has `KEY=VALUE` lines.

    A field is a value and never an option.

    Raises:
        UserError: a field is too long or not printable.
    """
    words = [f"--{name}={value}" for name, value in options.items() if value]
    words += [f"--set={line.strip()}" for line in (sets or "").splitlines() if line.strip()]
    if any(len(word) > LONGEST_FIELD or not word.isprintable() for word in words) or len(words) > MOST_WORDS:
        raise UserError(f"a field must have at most {LONGEST_FIELD} characters, all printable")
    return words


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A command that ended."""

    code: int
    out: str
    errors: str

    @property
    def fault(self) -> str:
        """The line of an error, for people."""
        return fault_of(self.code, self.errors)


@contextmanager
def workplace() -> Iterator[Path]:
    """A directory for one request, which is removed after it."""
    with tempfile.TemporaryDirectory(prefix="request-") as name:
        yield Path(name)


def run_command(words: Sequence[str], place: Path, limits: Limits) -> Ended:
    """Run `lean-finetune` with these words within the limits; `place` is the request's own directory.

    On a hosted page it starts in `place`, and opens files only there and in the code's own directories.

    Raises:
        UserError: it took too long.
    """
    hosted = limits.is_hosted
    given = {
        "seconds": limits.seconds if hosted else None,
        "memory_bytes": limits.memory_bytes,
        "file_bytes": limits.file_bytes,
        "only_below": [str(place)] if hosted else None,
    }
    command = [sys.executable, "-m", "lean_finetune.page.child", json.dumps(given), *words]
    with (place / "stdout").open("w+b") as out, (place / "stderr").open("w+b") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=errors,
            cwd=place if hosted else None,
            env=environment(place, hosted=hosted),
            start_new_session=True,
        )
        _running.add(process)
        if _ending.is_set():
            end_group(process)
        try:
            code = process.wait(limits.seconds)
        except subprocess.TimeoutExpired:
            raise UserError(f"the command took longer than {limits.seconds} s, and was ended") from None
        finally:
            end_group(process)
            _running.discard(process)
        out.seek(0)
        errors.seek(0)
        texts = [file.read(MOST_OUTPUT_BYTES).decode(errors="replace") for file in (out, errors)]
    return Ended(code=code, out=texts[0].replace(f"{place}/", ""), errors=texts[1].replace(f"{place}/", ""))


def end_commands() -> None:
    """End all commands, those that wait too: a page that ends would wait for them, and they would outlive it."""
    _ending.set()
    for process in list(_running):
        end_group(process)


def environment(place: Path, *, hosted: bool) -> dict[str, str]:
    """The variables of a command. On a hosted page without tokens, and with downloads into `place`."""
    if not hosted:
        return {**os.environ}
    kept = {name: value for name in PASSED_ON if (value := os.environ.get(name))}
    own = {name: str(place) for name in ("HOME", "TMPDIR", "HF_HOME", "XDG_CACHE_HOME")}
    return {**kept, **own, "HF_HUB_DISABLE_TELEMETRY": "1", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process that was started in a session of its own, with its children."""
    if sys.platform == "win32":
        process.kill()
    else:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    process.wait()
