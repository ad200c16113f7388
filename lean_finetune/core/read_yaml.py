"""Read YAML that others wrote: parameters, configurations of other tools, values of the command line.

Its size, nesting and aliases are limited, so that a small file cannot take much time or memory.
"""

import errno
import os
import stat
import time
from datetime import date
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer, ComposerError
from ruamel.yaml.error import YAMLError
from ruamel.yaml.events import AliasEvent

from lean_finetune.core.errors import UserError, shortened

MOST_BYTES = 1 << 20
MOST_VALUES = 20_000
"""Values with those of aliases; the shipped params.yaml has about 130."""
MOST_LEVELS = 50
LONGEST_REASON = 240
PIPE_SECONDS = 5.0
"""How long to wait for the writer of a pipe."""
MOST_BITS = 1024
"""Bits of an integer; every float fits."""

REFUSALS = (YAMLError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Exceptions of ruamel for a value that is no value of its type, such as `!!int abc` or the date 2024-02-30."""


class NotYaml(ValueError):
    """A text is not YAML, or is beyond a limit. The message is the reason, and `line` counts from 1."""

    def __init__(self, reason: str, line: int):
        super().__init__(reason)
        self.line = line


class _LimitedComposer(Composer):
    """Counts the values of each node; an alias counts as much as what it repeats."""

    def __init__(self, loader: Any = None):
        super().__init__(loader=loader)
        self.warn_double_anchors = False  # A later anchor of the same name counts, as YAML says.
        self.levels = self.values = 0
        self.values_of: dict[str, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        """See the base class."""
        event, before = self.parser.peek_event(), self.values
        if isinstance(event, AliasEvent):
            if event.anchor in self.anchors and event.anchor not in self.values_of:
                self._refuse(f"the alias *{event.anchor} contains itself", event)
            self.values += self.values_of.get(event.anchor, 0)
        else:
            self.values_of.pop(event.anchor, None)
        self.levels += 1
        self.values += 1
        if self.levels > MOST_LEVELS:
            self._refuse(f"values are nested more than {MOST_LEVELS} levels deep", event)
        if self.values > MOST_VALUES:
            self._refuse(f"it has more than {MOST_VALUES} values, counting those of aliases", event)
        node = super().compose_node(parent, index)
        self.levels -= 1
        if event.anchor and not isinstance(event, AliasEvent):
            self.values_of[event.anchor] = self.values - before
        return node

    @staticmethod
    def _refuse(reason: str, event: Any) -> None:
        raise ComposerError(None, None, reason, event.start_mark)


def parse_yaml(text: str) -> Any:
    """The value of a YAML 1.2 text, which DVC reads too: `1e-05` is a float, `no` is a string.

    Raises:
        NotYaml: it is not YAML, or is beyond a limit.
    """
    if len(text) > MOST_BYTES:
        raise NotYaml(f"it has more than {MOST_BYTES} bytes", 1)
    yaml = YAML(typ="safe", pure=True)
    yaml.Composer = _LimitedComposer
    try:
        value = yaml.load(text)
        _check_types(value)
        return value
    except REFUSALS as error:
        mark = getattr(error, "problem_mark", None)
        reason = getattr(error, "problem", None) or (
            str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        )
        raise NotYaml(shortened(" ".join(reason.split()), LONGEST_REASON), mark.line + 1 if mark else 1) from None


def _check_types(value: Any) -> None:
    """Raise ValueError for a value that JSON does not have, but for dates; later code would fail at it."""
    if isinstance(value, dict):
        for key, below in value.items():
            if not isinstance(key, str | int | float | None):
                raise ValueError(f"a key must be a text or a number; got {key!r}")
            _check_types(below)
    elif isinstance(value, list):
        for below in value:
            _check_types(below)
    elif isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise ValueError(f"an integer must have at most {MOST_BITS} bits; got {value.bit_length()}")
    elif not isinstance(value, str | int | float | date | None):
        raise ValueError(f"values of YAML type {type(value).__name__} are not used here")


def read_start(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """The first `most_bytes` + 1 bytes of a file, or of a pipe such as `<(…)`.

    Raises:
        OSError: it cannot be read, is a device, or is a pipe that nobody writes.
    """
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # Waits for no writer of a pipe.
    with os.fdopen(handle, "rb", buffering=0) as file:
        mode = os.fstat(handle).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
            raise OSError(errno.EINVAL, "is no file")
        parts, room, end = list[bytes](), most_bytes + 1, time.monotonic() + PIPE_SECONDS
        while room:
            part = file.read(room)  # None: the pipe is empty so far. Nothing: nobody writes, yet or any longer.
            if part:
                parts.append(part)
                room -= len(part)
            elif stat.S_ISREG(mode) or (part is not None and parts):
                break
            elif time.monotonic() > end:
                raise OSError(errno.EAGAIN, f"is a pipe that nobody writes for {PIPE_SECONDS:g} s")
            else:
                time.sleep(0.01)
        return b"".join(parts)


def read_yaml(path: Path, missing: str, remedy: str = "correct the file") -> Any:
    """The value of a YAML file.

    Raises:
        UserError: there is no such file, and what to do is `missing`; or it cannot be read, or is not YAML.
    """
    try:
        return parse_yaml(read_start(path).decode("utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: {missing}") from None
    except NotYaml as error:
        raise UserError(f"{path}:{error.line}: not YAML; {error}; correct it") from None
    except (OSError, UnicodeDecodeError) as error:
        first = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise UserError(f"{path}: must be a YAML file that can be read ({first}); {remedy}") from None
