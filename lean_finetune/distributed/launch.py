"""Run one command in several processes under torchrun's agent, with one output and one error message."""

import logging
import math
import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from uuid import uuid4

import psutil
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from lean_finetune.core.atomic_files import sha256_json, write_errors
from lean_finetune.core.errors import UserError
from lean_finetune.core.file_locks import clear, lock_directory, unlock_directory
from lean_finetune.core.parent_death import LAUNCHER
from lean_finetune.core.signals import FIRST_OF_SIGNALS, Interrupted
from lean_finetune.distributed.processes import World

RANKS_DIRECTORY = "LEAN_FINETUNE_RANKS"
"""Environment variable: the directory of this launch's processes; absent if the user started torchrun."""
FAULT = ".fault"
"""Suffix of a file with the error message of a process."""
TIMED_OUT = ".waited"
"""Suffix of a marker: the error is that this process waited too long for the others."""
LOST = ".lost"
"""Suffix of a marker: this process waited when the connection to another one broke."""
REPORTED = ".reported"
"""Suffix of a marker: this process has printed why it ended."""
GRACE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""Environment variable of torchrun's agent: seconds from a signal until it kills the processes. After a fault of one of
them, and in versions of torch without this variable, they have 30 seconds."""
LOST_SECONDS = 2
"""How long a process whose connection broke waits for another one to report the cause."""
LOCAL = "127.0.0.1"
LOOPBACK = "lo"
"""Linux' name of the loopback interface."""


def launch(module: str, arguments: Sequence[str], *, processes: int, directory: Path, grace_seconds: float) -> None:
    """Run `python -m module` in several processes on this node until all have ended.

    Rank 0 writes to the terminal. The output of the others, and every traceback, goes to `<rank>.log` in a directory of
    this launch below `directory`; directories of earlier launches are removed.

    `grace_seconds` is the time for the processes to end after a signal.

    Raises:
        UserError: a process failed; with its own message, or the path of its traceback.
        Interrupted: a signal came and was forwarded to all processes.
        SystemExit: with the code of a signal that rank 0 has reported.
    """
    with _locked(directory, uuid4().hex[:8], shared=False) as launch_directory:
        _launch(module, arguments, processes, launch_directory, grace_seconds)


@contextmanager
def _locked(directory: Path, name: str, *, shared: bool) -> Iterator[Path]:
    """The locked directory `name` in `directory`, after removing those whose launches have ended."""
    with write_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        for other in directory.iterdir():
            if other.is_dir() and (ended := lock_directory(other)) is not None:
                clear(other)
                unlock_directory(other, ended)
        lock = lock_directory(directory / name, shared=shared)
    try:
        yield directory / name
    finally:
        if lock is not None:
            os.close(lock)


def _agent_directory(directory: Path) -> AbstractContextManager[Path]:
    """A directory shared by the processes of a torchrun agent that the user started, locked while any of them runs."""
    parent = psutil.Process(os.getppid())
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    name = sha256_json([platform.node(), parent.pid, parent.create_time(), restarts])
    return _locked(directory, name[:8], shared=True)


def _launch(module: str, arguments: Sequence[str], processes: int, directory: Path, grace_seconds: float) -> None:
    """Run torchrun's agent; processes leave their logs and markers in `directory`."""
    os.environ[RANKS_DIRECTORY], os.environ[LAUNCHER] = str(directory.resolve()), str(os.getpid())
    os.environ.setdefault(GRACE, str(math.ceil(grace_seconds)))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # Else each process logs how the others ended.
    if sys.platform == "linux":
        # Else gloo resolves this host's name, which may be unknown.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=f"{LOCAL}:0",
        local_addr=LOCAL,
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
    )
    logging.disable(logging.CRITICAL)  # The agent's own messages; ours are below.
    try:
        elastic_launch(config, entrypoint=sys.executable)("-m", module, *arguments)
    except ChildFailedError as error:
        reported, code = (directory / f"0{REPORTED}").exists(), error.get_first_failure()[1].exitcode
        if reported and code > FIRST_OF_SIGNALS:  # A signal reached one process, and all have stopped cleanly.
            raise SystemExit(code) from None
        raise (_first_fault(directory, processes) or UserError(_how_it_ended(error, directory))) from None
    except SignalException as stopped:
        if (directory / f"0{REPORTED}").exists():
            raise SystemExit(FIRST_OF_SIGNALS + stopped.sigval) from None
        raise Interrupted(stopped.sigval) from None
    finally:
        logging.disable(logging.NOTSET)


def _first_fault(directory: Path, processes: int) -> UserError | None:
    """The first error message of a process, preferring one whose cause is not waiting for another process."""
    faults = sorted(directory.glob(f"*{FAULT}"), key=lambda path: (path.stat().st_mtime_ns, path.name))
    if not faults:
        return None
    causes = [path for path in faults if not path.with_suffix(TIMED_OUT).exists()]
    message, *details = (causes or faults)[0].read_text(encoding="utf-8").splitlines()
    waited = {path.stem for path in (*faults, *directory.glob(f"*{LOST}"))}
    absent = [str(rank) for rank in range(processes) if str(rank) not in waited]
    if absent and not causes and DID_NOT_COME not in message:
        message += DID_NOT_COME + ", ".join(absent)
    return UserError(message, *details)


def _how_it_ended(error: ChildFailedError, directory: Path) -> str:
    """The message for a process that ended without one."""
    rank, failure = error.get_first_failure()
    code = failure.exitcode
    how = f"with exit code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
    log = directory / f"{rank}.log"
    output = f"see {log}" if log.exists() and log.stat().st_size else "it printed nothing"
    return f"hardware.num_gpus: process {rank} ended {how}; {output}; {RESUMES}"


DID_NOT_COME = "; the one that did not come: process "
RESUMES = "the same command resumes from the last checkpoint, if there is one"


class WaitTimedOut(UserError):
    """This process waited too long for others, which are the ones at fault."""

    def __init__(self, message: str, *, absent: Sequence[int] = ()):
        super().__init__(message + (DID_NOT_COME + ", ".join(map(str, absent)) if absent else ""))


class ConnectionLost(Exception):
    """The connection broke while this process waited for others: one of them is at fault."""


EndProcess = Callable[[Exception], None]
"""Ends this process from any thread, as if its main thread had raised the fault."""


@contextmanager
def report_faults_once(world: World, launches: Path) -> Iterator[EndProcess | None]:
    """Send the output of all ranks but 0 to a log file, and report a fault once for all processes.

    `launch` prints the faults of processes that it started. If the user started torchrun, the first process of a node
    that has a fault prints it, and the others write to their logs. Yields a function that ends this process at once, or
    None for a single process.

    Raises:
        SystemExit: with code 1 after any fault, and with 128 + its number after a signal.
    """
    if world.size == 1:
        yield None
        return
    given = os.environ.get(RANKS_DIRECTORY)
    with _agent_directory(launches) if given is None else nullcontext(Path(given)) as directory:
        terminal = os.dup(2)
        if not world.is_first:
            handle = os.open(directory / f"{world.rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            for stream in (1, 2):
                os.dup2(handle, stream)
            os.close(handle)

        def end(fault: Exception) -> None:
            with suppress(SystemExit), _reported(world, directory, terminal):
                raise fault
            os._exit(1)

        try:
            with _reported(world, directory, terminal):
                yield end
        finally:
            os.close(terminal)


@contextmanager
def _reported(world: World, directory: Path, terminal: int) -> Iterator[None]:
    """Leave files that record how this process ended; print the fault if no `launch` will. Raises SystemExit."""
    marker = directory / str(world.rank)
    launched = RANKS_DIRECTORY in os.environ
    try:
        yield
        return
    except Interrupted as ending:
        if launched:  # `launch` prints it.
            sys.exit(ending.exit_code)
        raise
    except SystemExit:
        marker.with_suffix(REPORTED).touch()
        raise
    except UserError as fault:
        temporary = directory / f".{world.rank}"
        temporary.write_text("\n".join((" ".join(str(fault).split()), *fault.details)), encoding="utf-8")
        if isinstance(fault, WaitTimedOut):
            marker.with_suffix(TIMED_OUT).touch()
        temporary.rename(marker.with_suffix(FAULT))
    except Exception as fault:
        if isinstance(fault, ConnectionLost):
            marker.with_suffix(LOST).touch()
        with open(marker.with_suffix(".log"), "a", encoding="utf-8") as file:
            traceback.print_exc(file=file)
    if not launched:
        _print_fault(world, directory, terminal)
    sys.exit(1)


def _print_fault(world: World, directory: Path, terminal: int) -> None:
    """Print how this process ended, unless another process of the agent has printed its own fault."""
    marker = directory / str(world.rank)
    if marker.with_suffix(FAULT).exists():
        lines = marker.with_suffix(FAULT).read_text(encoding="utf-8").splitlines()
    elif marker.with_suffix(LOST).exists():
        time.sleep(LOST_SECONDS)
        lines = [
            "hardware.num_gpus: the connection to the other processes broke, since one of them ended; see the output "
            f"on the other machines and {directory}; {RESUMES}"
        ]
    else:
        lines = [f"hardware.num_gpus: process {world.rank} failed; see {marker.with_suffix('.log')}; {RESUMES}"]
    with suppress(OSError):  # Another process printed, or the terminal is closed.
        os.close(os.open(directory / "printed", os.O_CREAT | os.O_EXCL))
        os.write(terminal, "\n  ".join([f"error: {lines[0]}", *lines[1:]]).encode() + b"\n")
