"""The process of a command that the page starts: sets its limits, then runs `lean-finetune`.

python -m lean_finetune.page.child '{"seconds": 300, …}' fit --model=llama-3.1-8b
"""

import json
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

READING = ("open", "os.listdir", "os.scandir")
"""Audit events of Python that name a file or directory to be read or written."""


def set_limits(limits: Mapping[str, Any]) -> None:
    """Limit this process for good: CPU seconds, memory, sizes of files, and where it may open files."""
    if sys.platform != "win32":
        import resource

        for name, key in (("RLIMIT_CPU", "seconds"), ("RLIMIT_DATA", "memory_bytes"), ("RLIMIT_FSIZE", "file_bytes")):
            if (most := limits[key]) is not None:
                resource.setrlimit(getattr(resource, name), (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if limits["only_below"] is not None:
        open_only_below(limits["only_below"])


def open_only_below(directories: Sequence[str]) -> None:
    """Refuse to open files elsewhere, such as those that a visitor's configuration names."""
    allowed = tuple(os.path.join(os.path.realpath(each), "") for each in directories)

    def check(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in READING or not isinstance(arguments[0], str | bytes | os.PathLike):
            return
        path = os.path.realpath(os.fsdecode(arguments[0]))
        if not os.path.join(path, "").startswith(allowed):
            raise PermissionError(1, "not allowed on this page", os.fsdecode(arguments[0]))

    sys.addaudithook(check)


def of_python_and_system() -> list[str]:
    """Directories of code, and of what Python and its libraries read of the system."""
    found = [sys.prefix, sys.base_prefix, *filter(None, sys.path), str(Path(__file__).parents[2])]
    return [*found, "/proc", "/sys", "/dev", "/usr", "/lib", "/etc/ssl", "/etc/resolv.conf", "/etc/hosts"]


def main() -> None:
    """Run the command of `sys.argv` within the limits of its first argument."""
    limits = json.loads(sys.argv[1])
    if limits["only_below"] is not None:
        limits["only_below"] += of_python_and_system()
    set_limits(limits)
    sys.argv = ["lean-finetune", *sys.argv[2:]]
    runpy.run_module("lean_finetune", run_name="__main__")


if __name__ == "__main__":
    main()
