"""Windows or macOS as this project's code sees them: other modules, functions and files. Libraries still see Linux.

Run as a script: `emulated_system.py SYSTEM COMMANDS`, with the command lines as JSON. bitsandbytes cannot be imported.
It prints one JSON list: exit code and output of a stage, of each command line, and of importing all modules.
"""

import builtins
import contextlib
import ctypes
import errno
import fcntl
import importlib
import importlib.machinery
import io
import json
import os
import pkgutil
import platform
import signal
import stat
import sys
import traceback
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

OWN = {"cuda_memory", "lean_finetune", "stages"}
POSIX_MODULES = {"curses", "fcntl", "grp", "posix", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty"}
LINUX_ONLY = {
    "O_DIRECT",
    "O_TMPFILE",
    "eventfd",
    "memfd_create",
    "posix_fadvise",
    "posix_fallocate",
    "sched_getaffinity",
}
POSIX_ONLY = """
O_DIRECTORY O_NOFOLLOW O_SYNC chown fchmod fchown fork forkpty getgid getloadavg getpgid getpgrp getpriority getuid
geteuid killpg mkfifo nice pread preadv pwrite pwritev sched_yield sendfile setpgid setsid statvfs sysconf uname wait
wait3 waitid
""".split()
POSIX_SIGNALS = """
SIGALRM SIGBUS SIGCHLD SIGCONT SIGHUP SIGKILL SIGPIPE SIGPROF SIGQUIT SIGSTOP SIGTSTP SIGTTIN SIGTTOU SIGUSR1 SIGUSR2
SIGVTALRM SIGXCPU SIGXFSZ ITIMER_PROF ITIMER_REAL ITIMER_VIRTUAL alarm getitimer pause pthread_kill pthread_sigmask
setitimer sigpending sigwait
""".split()
EXTRAS = {"bitsandbytes", "gradio", "lm_eval", "triton"}
"""Modules of an extra, or for a GPU, which a module of this project imports at its top. Only runs that need it import
such a module."""
BETWEEN = {"contextlib", "genericpath", "os", "pathlib", "posixpath", "shutil"}
"""Modules through which this project's code calls the system."""


class Other(ModuleType):
    """A module with some values replaced and some missing."""

    def __init__(self, real: ModuleType, missing: Iterable[str] = (), **values: Any):
        super().__init__(real.__name__)
        vars(self)["_other"] = (real, frozenset(missing), values)

    def __getattr__(self, name: str) -> Any:
        real, missing, values = vars(self)["_other"]
        if name in missing:
            raise AttributeError(f"module {real.__name__!r} has no attribute {name!r} on this system")
        return values[name] if name in values else getattr(real, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_other"][0], name, value)


def called_by_own_code() -> bool:
    """Whether this project's code calls, perhaps through pathlib or shutil."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in BETWEEN:
        frame = frame.f_back
    return frame.f_globals.get("__name__", "").partition(".")[0] in OWN


def hide_linux_files() -> None:
    """Hide /proc and /sys."""

    def hidden(function: Any) -> Any:
        def checked(path: Any, *args: Any, **options: Any) -> Any:
            if isinstance(path, str | Path) and str(path).startswith(("/proc/", "/sys/")) and called_by_own_code():
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            return function(path, *args, **options)

        return checked

    for module, name in ((os, "stat"), (os, "scandir"), (os, "listdir"), (io, "open"), (builtins, "open")):
        setattr(module, name, hidden(getattr(module, name)))


def without_bitsandbytes() -> None:
    """Make bitsandbytes a package that is not installed."""

    class Finder(importlib.machinery.PathFinder):
        @classmethod
        def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> Any:
            return None if fullname == "bitsandbytes" else super().find_spec(fullname, path, target)

    sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Finder


def windows() -> dict[str, Any]:
    """The modules that differ on Windows."""
    remove = os.unlink

    def unlink(path: Any, *args: Any, **options: Any) -> None:
        """Refuses files that this process has open."""
        if called_by_own_code() and os.path.lexists(path):
            inode = os.lstat(path).st_ino
            for handle in os.listdir("/proc/self/fd"):
                with contextlib.suppress(OSError):
                    if os.fstat(int(handle)).st_ino == inode:
                        raise AssertionError(f"{path} is removed while it is open")
        remove(path, *args, **options)

    os.unlink = unlink

    def open_file(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if os.path.isdir(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return os.open(path, flags, *args, **options)

    def fsync(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode) or fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        os.fsync(handle)

    def locking(handle: int, mode: int, size: int) -> None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES)) from None

    def library(name: str | None) -> Any:
        if name is None:
            raise TypeError("expected str, not None")
        return ctypes.CDLL(name)

    return {
        "sys": Other(sys, platform="win32"),
        "os": Other(os, (*LINUX_ONLY, *POSIX_ONLY), name="nt", open=open_file, fsync=fsync),
        "signal": Other(signal, POSIX_SIGNALS, SIGBREAK=signal.SIGTTIN),
        "ctypes": Other(ctypes, CDLL=library),
        "platform": Other(platform, system=lambda: "Windows"),
        "msvcrt": SimpleNamespace(locking=locking, LK_NBLCK=2),
    }


def macos() -> dict[str, Any]:
    """The modules that differ on macOS."""
    return {
        "sys": Other(sys, platform="darwin"),
        "os": Other(os, LINUX_ONLY),
        "platform": Other(platform, system=lambda: "Darwin"),
    }


def emulate(system: str) -> None:
    """Change what this project's code imports from now on, before any of it is imported."""
    assert not OWN & sys.modules.keys()
    others: Mapping[str, Any] = windows() if system == "win32" else macos()
    blocked = POSIX_MODULES if system == "win32" else set()
    imported = builtins.__import__

    def importing(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if level == 0 and str((globals or {}).get("__name__")).partition(".")[0] in OWN:
            if name in blocked:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            if name in others:
                return others[name]
            if not fromlist and (top := name.partition(".")[0]) in others:
                imported(name)
                return others[top]
        return imported(name, globals, locals, fromlist, level)

    builtins.__import__ = importing
    hide_linux_files()
    without_bitsandbytes()


def run_stage() -> dict[str, Any]:
    """What a stage answers: its first import, as `python -m stages.train` makes it."""
    main_module, errors = sys.modules["__main__"], io.StringIO()
    own_spec, main_module.__spec__ = main_module.__spec__, find_spec("stages.train")
    code: Any = 0
    with contextlib.redirect_stderr(errors):
        try:
            importlib.import_module("lean_finetune.core.signals")
        except SystemExit as end:
            code = end.code
            sys.modules.pop("lean_finetune.core.signals", None)
    main_module.__spec__ = own_spec
    return {"code": code, "stdout": "", "stderr": errors.getvalue()}


def run_commands(lines: Iterable[list[str]]) -> list[dict[str, Any]]:
    """What `lean-finetune` answers to each command line."""
    from click.testing import CliRunner

    from lean_finetune.cli import main

    answers = []
    for words in lines:
        result = CliRunner().invoke(main, words)
        crash = (
            ""
            if isinstance(result.exception, SystemExit | None)
            else "".join(traceback.format_exception(result.exception))
        )
        answers.append({"code": result.exit_code, "stdout": result.stdout, "stderr": result.stderr + crash})
    return answers


def import_all() -> dict[str, Any]:
    """What importing every module of the library answers."""
    faults = []
    for package in (importlib.import_module(name) for name in ("cuda_memory", "lean_finetune")):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not found.name.endswith("__main__"):
                try:
                    importlib.import_module(found.name)
                except Exception as error:
                    if isinstance(error, ModuleNotFoundError) and error.name in EXTRAS:
                        continue
                    faults.append(f"{found.name}: {error!r}")
    return {"code": len(faults), "stdout": "", "stderr": "\n".join(faults)}


if __name__ == "__main__":
    emulate(sys.argv[1])
    print(json.dumps([run_stage(), *run_commands(json.loads(sys.argv[2])), import_all()]))
