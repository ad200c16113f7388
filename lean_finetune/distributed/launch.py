"""Several processes of one command, under torchrun's agent: what they say, how they end, and one error for all."""

import logging
import math
import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from uuid import uuid4

import psutil
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from lean_finetune.core.atomic_files import sha256_json, told_in_one_line
from lean_finetune.core.errors import UserError
from lean_finetune.core.file_locks import clear, hold, leave
from lean_finetune.core.parent_death import LAUNCHER
from lean_finetune.core.signals import FIRST_OF_SIGNALS, Interrupted
from lean_finetune.distributed.processes import World

DIRECTORY = "LEAN_FINETUNE_RANKS"
"""Variable of the environment that names the processes' directory; absent where the user started torchrun."""
FAULT = ".fault"
"""Ending of a file with the fault of a process: what a user is told."""
WAITED = ".waited"
"""Ending of a file beside the fault of a process that waited for the others in vain."""
LOST = ".lost"
"""Ending of a file of a process that waited when the link to the others broke: one of those had given up, or ended."""
TOLD = ".told"
"""Ending of a file of a process that told the user why it ended."""
GRACE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""Variable that tells torchrun's agent how many seconds processes have after a signal before they are killed. After a
fault of one of them they have 30, and always where torch does not know the variable."""
LOST_SECONDS = 2
"""How long a process whose link broke waits for one that knows why, before it says so."""
LOCAL = "127.0.0.1"
LOOPBACK = "lo"
"""Linux' name of the interface of that address."""


def launch(module: str, arguments: Sequence[str], *, processes: int, directory: Path, grace_seconds: float) -> None:
    """Run `python -m module` in several processes on this node, until all have ended.

    The first shows what it says; what another says, and every traceback, is in `directory`, in one of this launch's
    own, as `<rank>.log`. Those of launches that have ended are removed.

    Args:
        module: the entry.
        arguments: its command line.
        processes: how many.
        directory: of all launches.
        grace_seconds: how long they may take to end once a signal has asked them to.

    Raises:
        UserError: one of them failed: what it said first, or where its traceback is.
        Interrupted: a signal came, and was handed on to all.
        SystemExit: with the code of a signal, where that was told.
    """
    with _own(directory) as mine:
        _launch(module, arguments, processes, mine, grace_seconds)


@contextmanager
def _own(directory: Path) -> Iterator[Path]:
    """A directory inside for this launch alone, held while it runs; those of ended ones are removed."""
    with told_in_one_line(directory):
        _remove_ended(directory)
        mine = directory / uuid4().hex[:8]
        held = hold(mine)
    try:
        yield mine
    finally:
        if held is not None:
            os.close(held)


def _remove_ended(directory: Path) -> None:
    """Remove what launches that have ended left."""
    directory.mkdir(parents=True, exist_ok=True)
    for other in directory.iterdir():
        if other.is_dir() and (held := hold(other)) is not None:
            clear(other)
            leave(other, held)


@contextmanager
def _of_agent(directory: Path) -> Iterator[Path]:
    """A directory inside for the processes of one torchrun agent that the user started, held while any of them runs."""
    parent = psutil.Process(os.getppid())
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    name = sha256_json([platform.node(), parent.pid, parent.create_time(), restarts])
    with told_in_one_line(directory):
        _remove_ended(directory)
        held = hold(directory / name[:8], shared=True)
    try:
        yield directory / name[:8]
    finally:
        if held is not None:
            os.close(held)


def _launch(module: str, arguments: Sequence[str], processes: int, directory: Path, grace_seconds: float) -> None:
    """As above, with what the processes leave in `directory`."""
    os.environ[DIRECTORY], os.environ[LAUNCHER] = str(directory.resolve()), str(os.getpid())
    os.environ.setdefault(GRACE, str(math.ceil(grace_seconds)))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # Each process would warn of how the others ended.
    if sys.platform == "linux":
        os.environ.setdefault(
            "GLOO_SOCKET_IFNAME", LOOPBACK
        )  # Else it asks for this host's name, which may be unknown.
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
    logging.disable(logging.CRITICAL)  # The agent's own words; ours are below.
    try:
        elastic_launch(config, entrypoint=sys.executable)("-m", module, *arguments)
    except ChildFailedError as error:
        told, code = (directory / f"0{TOLD}").exists(), error.get_first_failure()[1].exitcode
        if told and code > FIRST_OF_SIGNALS:  # One of them was sent a signal, and all have stopped in order.
            raise SystemExit(code) from None
        raise (_first_fault(directory, processes) or UserError(_ended(error, directory))) from None
    except SignalException as stopped:
        if (directory / f"0{TOLD}").exists():
            raise SystemExit(FIRST_OF_SIGNALS + stopped.sigval) from None
        raise Interrupted(stopped.sigval) from None
    finally:
        logging.disable(logging.NOTSET)


def _first_fault(directory: Path, processes: int) -> UserError | None:
    """The fault of the process that met one of the user's first."""
    faults = sorted(directory.glob(f"*{FAULT}"), key=lambda path: (path.stat().st_mtime_ns, path.name))
    if not faults:
        return None
    own = [path for path in faults if not path.with_suffix(WAITED).exists()]
    message, *details = (own or faults)[0].read_text(encoding="utf-8").splitlines()
    there = {path.stem for path in (*faults, *directory.glob(f"*{LOST}"))}
    absent = [str(rank) for rank in range(processes) if str(rank) not in there]
    if absent and not own and DID_NOT_COME not in message:
        message += DID_NOT_COME + ", ".join(absent)
    return UserError(message, *details)


def _ended(error: ChildFailedError, directory: Path) -> str:
    """How the first process that failed otherwise ended."""
    rank, failure = error.get_first_failure()
    code = failure.exitcode
    how = f"with exit code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
    log = directory / f"{rank}.log"
    said = f"see {log}" if log.exists() and log.stat().st_size else "it said nothing"
    return (
        f"hardware.num_gpus: process {rank} ended {how}; {said}; the same command goes on from the last checkpoint, if "
        "one was made"
    )


DID_NOT_COME = "; the one that did not come: process "


class WaitTimedOut(UserError):
    """A process waited too long for the others: it is they that are at fault."""

    def __init__(self, message: str, *, absent: Sequence[int] = ()):
        """Say `message`, and which processes are at fault where that is known."""
        super().__init__(message + (DID_NOT_COME + ", ".join(map(str, absent)) if absent else ""))


class ConnectionLost(Exception):
    """The link to the others broke while a process waited for them: it is they that are at fault, or one of them."""


EndProcess = Callable[[Exception], None]
"""Ends this process from any thread as if its main thread had met the fault."""


@contextmanager
def report_faults_once(world: World, launches: Path) -> Iterator[EndProcess | None]:
    """In one of several processes: what all but the first say goes to a file, and a fault is told once.

    `launch` tells the faults of processes that it started. Where the user started torchrun, the first process of a node
    that meets a fault does so; the others write to their logs. Yields what ends one of several at once.

    Args:
        world: which process this is.
        launches: the directory of the logs of all launches.

    Raises:
        SystemExit: with code 1 after any fault, and with that of a signal.
    """
    if world.size == 1:
        yield None
        return
    where = os.environ.get(DIRECTORY)
    with _of_agent(launches) if where is None else nullcontext(Path(where)) as directory:
        terminal = os.dup(2)
        if not world.is_first:
            handle = os.open(directory / f"{world.rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            for stream in (1, 2):
                os.dup2(handle, stream)
            os.close(handle)

        def end(fault: Exception) -> None:
            with suppress(SystemExit), _told(world, directory, terminal):
                raise fault
            os._exit(1)

        try:
            with _told(world, directory, terminal):
                yield end
        finally:
            os.close(terminal)


@contextmanager
def _told(world: World, directory: Path, terminal: int) -> Iterator[None]:
    """As `_left_for_launch`; where no launch will tell it, this process does.

    Raises:
        SystemExit: with code 1 after any fault, and with that of a signal.
    """
    try:
        with _left_for_launch(world, directory):
            yield
    except SystemExit as ending:
        if DIRECTORY not in os.environ and ending.code == 1:
            _tell_fault(world, directory, terminal)
        raise


@contextmanager
def _left_for_launch(world: World, directory: Path) -> Iterator[None]:
    """Leave files that say how this process ended.

    Raises:
        SystemExit: with code 1 after any fault, and with that of a signal.
    """
    mine = directory / str(world.rank)
    try:
        yield
    except Interrupted as ending:
        if DIRECTORY not in os.environ:
            raise
        sys.exit(ending.exit_code)  # `launch` tells it.
    except SystemExit:
        mine.with_suffix(TOLD).touch()
        raise
    except UserError as fault:
        aside = directory / f".{world.rank}"
        aside.write_text("\n".join((" ".join(str(fault).split()), *fault.details)), encoding="utf-8")
        if isinstance(fault, WaitTimedOut):
            mine.with_suffix(WAITED).touch()
        aside.rename(mine.with_suffix(FAULT))
        sys.exit(1)
    except Exception as fault:
        if isinstance(fault, ConnectionLost):
            mine.with_suffix(LOST).touch()
        with open(mine.with_suffix(".log"), "a", encoding="utf-8") as file:
            traceback.print_exc(file=file)
        sys.exit(1)


def _tell_fault(world: World, directory: Path, terminal: int) -> None:
    """Tell how this process ended, unless one of the same agent did before."""
    mine = directory / str(world.rank)
    goes_on = "the same command goes on from the last checkpoint, if one was made"
    if mine.with_suffix(FAULT).exists():
        lines = mine.with_suffix(FAULT).read_text(encoding="utf-8").splitlines()
    elif mine.with_suffix(LOST).exists():
        time.sleep(LOST_SECONDS)
        lines = [
            "hardware.num_gpus: the link to the other processes broke, since one of them ended; see the output on the "
            f"other machines and {directory}; {goes_on}"
        ]
    else:
        lines = [f"hardware.num_gpus: process {world.rank} met a fault; see {mine.with_suffix('.log')}; {goes_on}"]
    with suppress(OSError):  # Another one told, or nobody can be told.
        os.close(os.open(directory / "told", os.O_CREAT | os.O_EXCL))
        os.write(terminal, "\n  ".join([f"error: {lines[0]}", *lines[1:]]).encode() + b"\n")
