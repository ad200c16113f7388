"""Run one command in several processes under torchrun's agents, one for each node: one output and one error message."""

import logging
import math
import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Literal
from uuid import uuid4

import psutil
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from lean_finetune.core.atomic_files import sha256_json, write_errors
from lean_finetune.core.errors import UserError
from lean_finetune.core.file_locks import clear, lock_directory, unlock_directory
from lean_finetune.core.parent_death import LAUNCHER
from lean_finetune.core.signals import FIRST_OF_SIGNALS, Interrupted
from lean_finetune.distributed.faults import HOSTS, ConnectionLost, Ending, EndProcess, OtherNodeEnded, WaitTimedOut
from lean_finetune.distributed.nodes import LOCAL, Node, NodeGroup
from lean_finetune.distributed.processes import World, attempt, listen_on_loopback

RANKS_DIRECTORY = "LEAN_FINETUNE_RANKS"
"""Environment variable: the directory of this launch's processes; absent if the user started torchrun."""
FAULT = ".fault"
"""Suffix of a file with the error message of a process."""
EXIT_CODE = ".code"
"""Suffix of a file with the exit code of that error."""
TIMED_OUT = ".waited"
"""Suffix of a marker: the error is that this process waited too long for the others."""
LOST = ".lost"
"""Suffix of a marker: this process waited when the connection to another one broke."""
ENDED = ".ended"
"""Suffix of a marker: this process was ended as those of another node had, which it did not notice."""
REPORTED = ".reported"
"""Suffix of a marker: this process has printed why it ended."""
GRACE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""Environment variable of torchrun's agent: seconds from a signal until it kills the processes. After a fault of one
process, and in versions of torch without this variable, the others have 30 seconds."""
RUN_ID = "lean-finetune"
"""torchrun's identifier of a run; the same on all nodes."""
LOST_SECONDS = 2
"""How long a process whose connection broke waits for another one to report the cause."""
ONE_NODE = Node()


def launch(
    module: str,
    arguments: Sequence[str],
    *,
    processes: int,
    directory: Path,
    grace_seconds: float,
    node: Node = ONE_NODE,
    max_restarts: int = 0,
) -> None:
    """Run `python -m module` in several processes on this node, until the processes of all nodes have ended.

    Rank 0 writes to the terminal. The output of the others, and every traceback, goes to `<rank>.log` in a directory of
    this launch below `directory`; directories of earlier launches are removed.

    Args (those that their types do not explain):
        processes: on each node.
        grace_seconds: how long processes may take to end after a signal, and nodes to connect.
        max_restarts: how often torchrun's agent restarts the processes after a crash.

    Raises:
        UserError: a process failed, on any node; with its own message, or the path of its traceback.
        Interrupted: a signal came and was forwarded to all processes.
        SystemExit: with the code of a signal that a process has reported.
    """
    name = uuid4().hex[:8] if node.count == 1 else f"node{node.rank}-{uuid4().hex[:8]}"
    with _locked(directory, name, shared=False) as launch_directory:
        group = NodeGroup(node, grace_seconds, lambda line: print(line, file=sys.stderr, flush=True))
        _launch(module, arguments, processes, launch_directory, grace_seconds, group, max_restarts)


@contextmanager
def _locked(directory: Path, name: str, *, shared: bool) -> Iterator[Path]:
    """The locked directory `name` in `directory`, after removing the directories of launches that have ended."""
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


def _launch(
    module: str,
    arguments: Sequence[str],
    processes: int,
    directory: Path,
    grace_seconds: float,
    group: NodeGroup,
    max_restarts: int,
) -> None:
    """Run torchrun's agent; processes leave their logs and markers in `directory`."""
    node = group.node
    os.environ[RANKS_DIRECTORY], os.environ[LAUNCHER] = str(directory.resolve()), str(os.getpid())
    os.environ[HOSTS] = ",".join(group.hosts)
    os.environ.setdefault(GRACE, str(math.ceil(grace_seconds)))
    if node.count == 1:
        listen_on_loopback()
    elif sys.platform == "linux":
        # Else gloo resolves this host's name, which may be unknown.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", group.interface)
    config = LaunchConfig(
        min_nodes=node.count,
        max_nodes=node.count,
        nproc_per_node=processes,
        run_id=RUN_ID,
        # Unlike "c10d", it gives node_rank its ranks, and exchanges no pickles.
        rdzv_backend="static",
        rdzv_endpoint=f"{node.host}:{group.port}",
        rdzv_configs={"rank": node.rank, "timeout": math.ceil(grace_seconds)},
        local_addr=LOCAL,
        max_restarts=max_restarts,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
    )
    logging.disable(logging.CRITICAL)  # The agent's own messages; ours are below.
    try:
        elastic_launch(config, entrypoint=sys.executable)("-m", module, *arguments)
        group.leave()
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        if code > FIRST_OF_SIGNALS and list(directory.glob(f"*{REPORTED}")):
            group.leave()  # A signal reached one process, and all have stopped cleanly.
            raise SystemExit(code) from None
        raise group.end(_ending(error, directory), processes, max_restarts) from None
    except dist.DistError:  # Before a restart, the agent could not reach node 0.
        own = list(range(node.rank * processes, (node.rank + 1) * processes))
        lost = Ending(kind="lost", message=f"{BROKEN}; see {directory}; {RESUMES}", waited=own)
        raise group.end(lost, processes, max_restarts) from None
    except SignalException as stopped:
        group.leave()
        if list(directory.glob(f"*{REPORTED}")):  # Rank 0 says so, on its node.
            raise SystemExit(FIRST_OF_SIGNALS + stopped.sigval) from None
        raise Interrupted(stopped.sigval) from None
    finally:
        logging.disable(logging.NOTSET)


def _ending(error: ChildFailedError, directory: Path) -> Ending:
    """Why the processes of this node ended. An error in a process comes before a timeout in one that waited for it."""
    faults = sorted(directory.glob(f"*{FAULT}"), key=lambda path: (path.stat().st_mtime_ns, path.name))
    causes = [path for path in faults if not path.with_suffix(TIMED_OUT).exists()]
    waited, ended = _marked(directory, TIMED_OUT, LOST), _marked(directory, ENDED)
    if faults:
        message, *details = (causes or faults)[0].read_text(encoding="utf-8").splitlines()
        kind: Literal["cause", "waited"] = "cause" if causes else "waited"
        code = int((causes or faults)[0].with_suffix(EXIT_CODE).read_text())
        return Ending(kind=kind, message=message, details=details, exit_code=code, waited=waited, ended=ended)
    crashed = {rank: failure for rank, failure in error.failures.items() if rank not in {*waited, *ended}}
    if not crashed:
        return Ending(kind="lost", message=f"{BROKEN}; see {directory}; {RESUMES}", waited=waited, ended=ended)
    rank, failure = ChildFailedError(error.name, crashed).get_first_failure()
    code = failure.exitcode
    how = f"with exit code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
    log = directory / f"{rank}.log"
    output = f"see {log}" if log.exists() and log.stat().st_size else "it printed nothing"
    message = f"hardware.num_gpus: process {rank} ended {how}; {output}; {RESUMES}"
    return Ending(kind="cause", message=message, waited=waited, ended=ended)


def _marked(directory: Path, *suffixes: str) -> list[int]:
    """The ranks that left a marker."""
    return sorted({int(path.stem) for suffix in suffixes for path in directory.glob(f"*{suffix}")})


BROKEN = "hardware.num_gpus: the connection to other processes broke"
RESUMES = "the same command resumes from the last checkpoint, if there is one"


@contextmanager
def report_faults_once(world: World, launches: Path) -> Iterator[EndProcess | None]:
    """Send the output of all ranks but 0 to a log file, and report a fault once for all processes.

    `launch` prints the faults of processes that it started. If the user started torchrun, the first process of a node
    that has a fault prints it, and the others write to their logs. Yields a function that ends this process at once, or
    None for a single process.

    Raises:
        SystemExit: with the code of a `UserError`, 1 after another fault, and 128 + its number after a signal.
    """
    if world.size == 1:
        yield None
        return
    given = os.environ.get(RANKS_DIRECTORY)
    with _agent_directory(launches) if given is None else nullcontext(Path(given)) as directory:
        _forget_waiting(directory, world)
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


def _forget_waiting(directory: Path, world: World) -> None:
    """Remove the files of this process's last attempt, if torchrun has restarted it.

    Raises SystemExit if an attempt ended by a signal or by an error that would recur, or if a restarted process timed
    out while it waited for others: their machine is lost.
    """
    if not attempt():
        return
    for reported in directory.glob(f"*{REPORTED}"):
        sys.exit(int(reported.read_text()))
    if any(attempt() > 1 or not fault.with_suffix(TIMED_OUT).exists() for fault in directory.glob(f"*{FAULT}")):
        sys.exit(1)
    for suffix in (FAULT, EXIT_CODE, TIMED_OUT, LOST, ENDED):
        (directory / str(world.rank)).with_suffix(suffix).unlink(missing_ok=True)


@contextmanager
def _reported(world: World, directory: Path, terminal: int) -> Iterator[None]:
    """Leave files that record how this process ended; print the fault if no `launch` will. Raises SystemExit."""
    marker, code = directory / str(world.rank), UserError.exit_code
    launched = RANKS_DIRECTORY in os.environ
    try:
        yield
        return
    except Interrupted as ending:
        if launched:  # `launch` prints it.
            sys.exit(ending.exit_code)
        raise
    except SystemExit as ending:
        marker.with_suffix(REPORTED).write_text(str(ending.code))
        raise
    except UserError as fault:
        code = fault.exit_code
        marker.with_suffix(EXIT_CODE).write_text(str(code))
        temporary = directory / f".{world.rank}"
        temporary.write_text("\n".join((" ".join(str(fault).split()), *fault.details)), encoding="utf-8")
        if isinstance(fault, WaitTimedOut):
            marker.with_suffix(TIMED_OUT).touch()
        temporary.rename(marker.with_suffix(FAULT))
    except Exception as fault:
        if isinstance(fault, ConnectionLost):
            marker.with_suffix(LOST).touch()
        if isinstance(fault, OtherNodeEnded):
            marker.with_suffix(ENDED).touch()
        with open(marker.with_suffix(".log"), "a", encoding="utf-8") as file:
            traceback.print_exc(file=file)
    if not launched:
        _print_fault(world, directory, terminal)
    sys.exit(code)


def _print_fault(world: World, directory: Path, terminal: int) -> None:
    """Print how this process ended, unless another process of the agent has printed its own fault."""
    marker = directory / str(world.rank)
    if marker.with_suffix(FAULT).exists():
        lines = marker.with_suffix(FAULT).read_text(encoding="utf-8").splitlines()
    elif marker.with_suffix(LOST).exists():
        time.sleep(LOST_SECONDS)
        lines = [f"{BROKEN}, since one of them ended; see the output on the other machines and {directory}; {RESUMES}"]
    else:
        lines = [f"hardware.num_gpus: process {world.rank} failed; see {marker.with_suffix('.log')}; {RESUMES}"]
    with suppress(OSError):  # Another process printed, or the terminal is closed.
        os.close(os.open(directory / "printed", os.O_CREAT | os.O_EXCL))
        os.write(terminal, "\n  ".join([f"error: {lines[0]}", *lines[1:]]).encode() + b"\n")
