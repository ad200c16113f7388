"""`python -m tests.faults.runner`: imports each stage once, and forks a process for each run of one.

Importing torch takes seconds and a fork takes none, so stages can be killed many times. Each run calls the stage's
entry in a forked process that leads a new session, and ends as an interpreter ends. A fault happens inside that
process: a limit, a missing privilege, or an action at its n-th change of a directory entry, where a half-written output
would show.

Requests and answers are lines of JSON; see `tests/faults/stage_run.py`, which writes them.
"""

import atexit
import contextlib
import ctypes
import importlib
import json
import os
import resource
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from tests.data.small_blocks import make_blocks_small
from tests.processes import run_bounded

LLAMA = "transformers.models.llama.modeling_llama"
IMPORTED_LATE = {
    "tokenize": ("pyarrow.compute", "tiktoken"),
    **dict.fromkeys(("estimate", "reference", "train", "evaluate"), (LLAMA,)),
    "report": ("pandas",),
    "lean_finetune.commands.export:export": ("lean_finetune.commands.tuned.tuned_model", LLAMA),
}
"""What stages import while they run; imported here once instead of in every fork."""
CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink"}
"""Audit events raised before a directory entry is created, removed or renamed."""
CAPABILITY_VERSION = 0x20080522


def main() -> None:
    """Answer requests until standard input ends."""
    make_blocks_small()
    answer({"ready": os.getpid()})
    outputs: dict[int, int] = {}
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            status = end_of(request["wait"], request["seconds"])
            answer({"status": status, "output": read_out(outputs.pop(request["wait"]))})
        elif "mount" in request:
            mount(**request["mount"])
            answer({})
        else:
            # A pipe: RLIMIT_FSIZE does not apply to it, and a stage prints less than a pipe's buffer.
            entry = entry_of(request["module"])
            out, into = os.pipe()
            led, leads = os.pipe()
            child = os.fork()
            if child == 0:
                os.setsid()
                os.write(leads, b"!")
                os.close(leads)
                become(request, into)
                run_to_the_end(entry, request["arguments"])
            os.read(led, 1)  # Wait until it leads its session, so that a signal to the session reaches it.
            for end in (led, leads, into):
                os.close(end)
            outputs[child] = out
            answer({"pid": child})


@cache
def entry_of(module: str) -> Callable[[list[str]], object]:
    """Import a stage, or a command by `module:name`, and lazily imported modules; return its entry point."""
    where, _, name = module.partition(":")
    entry = getattr(importlib.import_module(where), name) if name else importlib.import_module(f"stages.{module}").main
    for late in IMPORTED_LATE.get(module, ()):
        importlib.import_module(late)
    return entry


def answer(content: dict[str, Any]) -> None:
    """Write one answer."""
    print(json.dumps(content), flush=True)


def end_of(child: int, seconds: float) -> int | None:
    """Wait for a child's exit status, negative for a signal; None: it did not end in time and was killed."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def read_out(pipe: int) -> str:
    """Read all bytes that are in a pipe."""
    os.set_blocking(pipe, False)
    text = b""
    with contextlib.suppress(BlockingIOError):  # A process that is still running has the other end open.
        while part := os.read(pipe, 1 << 16):
            text += part
    os.close(pipe)
    return text.decode()


def mount(target: str, size_bytes: int, image: str | None) -> None:
    """Mount memory of this size, or a file with a file system, at a directory, for this process and its forks."""
    if image is not None:
        run_bounded(["mount", "-o", "loop", image, target], check=True)
        return
    libc = ctypes.CDLL(None, use_errno=True)
    where = os.fsencode(target)
    if libc.mount(b"tmpfs", where, b"tmpfs", 0, b"size=%d" % size_bytes):
        raise OSError(ctypes.get_errno(), f"mount at {target}")


def become(request: dict[str, Any], output: int) -> None:
    """Set up this forked process as the request describes."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.chdir(request["cwd"])
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # As `lean_finetune.core.signals` sets it on import.
    if request["file_bytes"] is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_bytes"], request["file_bytes"]))
    if request["memory_bytes"] is not None:
        most = psutil.Process().memory_info().vms + request["memory_bytes"]
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    if request["group"] is not None:
        Path(request["group"], "cgroup.procs").write_text(str(os.getpid()))
    if request["closed_output"]:
        unread, into = os.pipe()
        os.dup2(into, 1)
        os.close(unread)
        os.close(into)
    if request["unprivileged"]:
        drop_privileges()
    if request["at_change"] is not None or request["changes"] is not None:
        watch_changes(request)


def run_to_the_end(entry: Callable[[list[str]], object], arguments: list[str]) -> None:
    """Run an entry point and exit as the interpreter does, without the two seconds of finalising torch's modules."""
    status: object = 1
    try:
        entry(arguments)
    except SystemExit as ending:
        status = ending.code
    except BaseException:
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]  # Waits for non-daemon threads.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else 0)


def drop_privileges() -> None:
    """Drop the capabilities that let root ignore file permissions."""
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    nothing = (ctypes.c_uint32 * 6)()
    if ctypes.CDLL(None, use_errno=True).capset(header, nothing):
        raise OSError(ctypes.get_errno(), "capset")


def watch_changes(request: dict[str, Any]) -> None:
    """Count the changes of directory entries in this process, list them or act at one of them.

    Changes outside the working directory (a library's caches) are not counted.
    """
    own, here, count, acting = os.getpid(), os.getcwd(), 0, False
    log = None if request["changes"] is None else open(request["changes"], "w")  # noqa: SIM115 - until the process ends
    act = action_of(request)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count, acting
        if event not in CHANGES or acting or os.getpid() != own or not is_below(here, arguments[0]):
            return
        acting = True
        if log is not None:
            print(event, os.fsdecode(arguments[0]), file=log, flush=True)
        if count == request["at_change"]:
            act()
        count += 1
        acting = False

    sys.addaudithook(hook)


def is_below(here: str, path: Any) -> bool:
    """Return whether the path of an audit event is below a directory; a bare name is relative to an open directory."""
    return os.path.abspath(os.fsdecode(path)).startswith(here)


def action_of(request: dict[str, Any]) -> Callable[[], None]:
    """Inject the fault: send a signal to this process, or remove a directory."""
    if request["removes"] is not None:
        return lambda: shutil.rmtree(request["removes"], ignore_errors=True)
    return lambda: os.kill(os.getpid(), request["signal"])


if __name__ == "__main__":
    main()
