"""How the processes of a run end: an error file for each, one error for the run, threads that end a stuck one."""

import json
import os
import platform
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from cuda_memory.terminal import echo
from lean_finetune.core.errors import UserError
from lean_finetune.core.file_locks import locked_directory
from lean_finetune.core.signals import FIRST_OF_SIGNALS, LAUNCHER, Interrupted
from lean_finetune.distributed.processes import World, attempt

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""torchrun's environment variable: the file in which a process says how it ended."""
RESUMES = "the same command resumes from the last checkpoint, if there is one"
TIMED_OUT = re.compile("timed out|timeout", re.IGNORECASE)
CONNECTION_LOST = re.compile(
    "connection (closed|reset|refused)|broken pipe|communicator was aborted|ncclRemoteError", re.IGNORECASE
)
POLL_SECONDS = 1.0
ENDED_SECONDS = 2.0
"""Time for a process to notice a broken connection and report it, and for others to report the cause first."""

EndProcess = Callable[[Exception], None]
"""Ends this process from any thread, as if its main thread had raised the fault."""
Kind = Literal["error", "crash", "waited", "lost", "ended", "stopped"]
"""Of an ending: a `UserError` | another exception, or a kill | the exceptions below | an exit after a signal."""


class WaitTimedOut(UserError):
    """This process timed out while it waited for others; the cause is in one of them."""

    kind: Kind = "waited"

    def __init__(self, message: str, absent: Sequence[int] = ()):
        """`absent`: the ranks that did not come, if this process knows them."""
        super().__init__(message)
        self.absent = absent


class ConnectionLost(Exception):
    """The connection broke while this process waited for others; the cause is in one of them."""

    kind: Kind = "lost"


class OtherNodeEnded(Exception):
    """The processes of another node have ended, and this one did not notice: it hangs, or waits for them."""

    kind: Kind = "ended"


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a process ended: the content of its error file, in which torchrun reads `message` and `timestamp`."""

    kind: Kind
    message: str
    details: Sequence[str] = ()
    exit_code: int = UserError.exit_code
    absent: Sequence[int] = ()
    """The ranks that did not come, if this process knows them."""
    timestamp: float = field(default_factory=time.time)


def ending_of(fault: Exception, rank: int, directory: Path) -> Ending:
    """How process `rank` ends with this fault; its log is in `directory`."""
    if isinstance(fault, UserError):
        return Ending(
            kind=getattr(fault, "kind", "error"),
            message=" ".join(str(fault).split()),
            details=fault.details,
            exit_code=fault.exit_code,
            absent=getattr(fault, "absent", ()),
        )
    if isinstance(fault, ConnectionLost | OtherNodeEnded):
        return Ending(kind=fault.kind, message=broken_connection(directory))
    log = directory / f"{rank}.log"
    return Ending(kind="crash", message=f"hardware.num_gpus: process {rank} failed; see {log}; {RESUMES}")


def broken_connection(directory: Path) -> str:
    """The message of a process that lost the others; logs are in `directory`."""
    return f"hardware.num_gpus: the connection to other processes broke; see {directory}; {RESUMES}"


def endings_in(directory: Path, failures: Mapping[int, ProcessFailure] = MappingProxyType({})) -> dict[int, Ending]:
    """How this node's processes ended, the first one first: as their error files say.

    Of processes without a file, only torchrun's first failure is a cause: the agent has ended the others.
    """
    files = {int(file.stem): file for file in directory.glob("*.json")}
    endings = {rank: Ending(**json.loads(file.read_text(encoding="utf-8"))) for rank, file in files.items()}
    only_lost = [rank for rank, ending in endings.items() if ending.kind in ("lost", "ended")]
    if causes := {rank: failure for rank, failure in failures.items() if rank not in only_lost}:
        rank, failure = min(causes.items(), key=lambda item: item[1].timestamp)
        code, log = failure.exitcode, directory / f"{rank}.log"
        how = f"with exit code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
        output = f"see {log}" if log.exists() and log.stat().st_size else "it printed nothing"
        message = f"hardware.num_gpus: process {rank} ended {how}; {output}; {RESUMES}"
        endings.setdefault(rank, Ending(kind="crash", message=message, timestamp=failure.timestamp))
    return dict(sorted(endings.items(), key=lambda item: item[1].timestamp))


def fault_of(endings: Mapping[int, Ending], hosts: Sequence[str], per_node: int) -> UserError:
    """The error of the run from those of its processes: a cause if there is one, else a timeout with who did not come.

    `hosts` are the names of the nodes, with `per_node` processes each; a node may be missing in `endings`.
    """
    kinds = get_args(Kind)  # Causes before what follows from them.
    first = min(endings, key=lambda one: (kinds.index(endings[one].kind), one // per_node, endings[one].timestamp))
    ending, node, message = endings[first], first // per_node, endings[first].message
    if ending.kind in ("error", "crash"):
        nodes = {rank // per_node for rank, other in endings.items() if other.message == message}
        if len(hosts) > 1 and len(nodes) < len(hosts) and f"node {node} ({hosts[node]})" not in message:
            message += f" (on node {node}, {hosts[node]})"
        return UserError.of_code(ending.exit_code, message, *ending.details)
    kind_of = {rank: other.kind for rank, other in endings.items()}
    absent = ending.absent or [
        rank for rank in range(per_node * len(hosts)) if kind_of.get(rank) not in ("waited", "lost", "ended")
    ]
    if not absent and ending.kind == "waited":  # Another node's end has ended the one that hangs.
        absent = [rank for rank in sorted(kind_of) if kind_of[rank] == "ended"]
    return UserError(message + _did_not_come(absent, hosts, per_node), *ending.details)


def _did_not_come(ranks: Sequence[int], hosts: Sequence[str], per_node: int) -> str:
    """The end of a message that names these ranks, with their nodes if there are several."""
    named = []
    for node, own in groupby(ranks, lambda rank: rank // per_node):
        where = f" on node {node} ({hosts[node]})" if len(hosts) > 1 else ""
        named.append(f"process {', '.join(map(str, own))}{where}")
    return f"; the one that did not come: {', '.join(named)}" if named else ""


@contextmanager
def report_faults_once(world: World, launches: Path) -> Iterator[EndProcess | None]:
    """Send the output of all ranks but 0 to a log file, and write a fault to the error file that torchrun reads.

    `launch` prints one error for the processes that it started. If the user started torchrun, the first process of each
    node has the terminal, each process prints its own error, and torchrun the first one of its node.

    Yields a function that ends this process at once, or None for a single process.

    Raises:
        SystemExit: with the code of a `UserError`, 1 after another fault, and 128 + its number after a signal.
    """
    if world.size == 1:
        yield None
        return
    with _log_directory(launches) as directory:
        if world.rank if LAUNCHER in os.environ else world.local_rank:
            with open(directory / f"{world.rank}.log", "ab") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)

        def end(fault: Exception) -> None:
            with suppress(SystemExit), _recorded(world, directory):
                raise fault
            os._exit(1)  # The main thread may be stuck in C++.

        with _recorded(world, directory):
            yield end


def _log_directory(launches: Path) -> AbstractContextManager[Path]:
    """That of `launch`, or one that the processes of a torchrun agent share, locked while any of them runs."""
    if LAUNCHER in os.environ:
        return nullcontext(Path(os.environ[ERROR_FILE]).parent)
    return locked_directory(launches, f"{platform.node()}-{os.getppid()}", shared=True)


@contextmanager
def _recorded(world: World, directory: Path) -> Iterator[None]:
    """Write the error file if the block raises, and print the fault if no `launch` will. Raises SystemExit."""
    launched = LAUNCHER in os.environ
    try:
        yield
    except Interrupted as interrupted:
        if launched:  # `launch` prints it.
            sys.exit(interrupted.exit_code)
        raise
    except SystemExit as leaving:
        if isinstance(leaving.code, int) and leaving.code > FIRST_OF_SIGNALS:
            _write(Ending(kind="stopped", message="stopped by a signal", exit_code=leaving.code), world.rank, directory)
        raise
    except Exception as fault:
        ending = ending_of(fault, world.rank, directory)
        if ending.kind == "lost" and not launched:
            time.sleep(ENDED_SECONDS)  # torchrun calls the process that ends first the cause.
        _write(ending, world.rank, directory)
        if not isinstance(fault, UserError):
            with open(directory / f"{world.rank}.log", "a", encoding="utf-8") as log:
                traceback.print_exc(file=log)
        if not launched:
            line = f"error: {ending.message}{_did_not_come(ending.absent, [''], world.size)}"
            for each in (line, *(f"  {detail}" for detail in ending.details)):
                echo(each, err=True)
        sys.exit(ending.exit_code)


def _write(ending: Ending, rank: int, directory: Path) -> None:
    """Write the error file of process `rank`, whole or not at all: torchrun reads it."""
    file = Path(os.environ.get(ERROR_FILE) or directory / f"{rank}.json")
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(ending)), encoding="utf-8")
    partial.rename(file)


@contextmanager
def explain_timeouts(
    world: World, seconds: float, where: Callable[[], str] = lambda: "before or after its steps"
) -> Iterator[None]:
    """Turn a timed-out or broken connection inside the block into an error that names process, time and place.

    Raises:
        WaitTimedOut: this process waited too long for the others.
        ConnectionLost: the others had given up before, or ended.
    """
    try:
        yield
    except RuntimeError as error:
        if world.size > 1 and TIMED_OUT.search(str(error)):
            raise _timed_out(world, seconds, where(), getattr(error, "ranks", ())) from error
        if world.size > 1 and CONNECTION_LOST.search(str(error)):
            raise ConnectionLost(str(error)) from error
        raise


def _timed_out(world: World, seconds: float, where: str, absent: Sequence[int] = ()) -> WaitTimedOut:
    """`absent` are the ranks of a BarrierTimeout."""
    message = (
        f"run.rank_timeout_seconds: limits how long a process waits for the others; process {world.rank} of "
        f"{world.size} waited {seconds:g} s {where}; raise it if one process may take longer"
    )
    return WaitTimedOut(message, absent)


@contextmanager
def _polled(check: Callable[[], Exception | None], end: EndProcess) -> Iterator[None]:
    """Call `check` each second in a thread, and `end` with the first fault that it returns."""
    finished = threading.Event()

    def poll() -> None:
        while not finished.wait(POLL_SECONDS):
            if (fault := check()) is not None:
                if not finished.wait(ENDED_SECONDS):
                    end(fault)
                return

    thread = threading.Thread(target=poll, name="fault_watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join(POLL_SECONDS)  # Without a connection, a call of the store takes a quarter of an hour.


def nccl_errors(device: torch.device) -> Callable[[], list[str]] | None:
    """Return a function that returns the error names of all groups; None on CPUs, where gloo raises its errors."""
    if device.type != "cuda" or not dist.is_initialized():
        return None
    return lambda: [group._get_backend(device).get_error().name for group in list(dist.distributed_c10d._world.pg_map)]


def watch_nccl(
    device: torch.device, world: World, seconds: float, where: Callable[[], str], end: EndProcess
) -> AbstractContextManager[None]:
    """End this process at NCCL's first error, with the message that gloo's would have.

    Collectives on GPUs are asynchronous, so no Python call fails when another process hangs. After the timeout of the
    process group PyTorch's watchdog thread records an error, waits for its debug dump
    (TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC, at least 15 s), and ends the process by SIGABRT; the launcher would blame that
    process, which only waited. With TORCH_NCCL_BLOCKING_WAIT no collective could overlap with computation.

    Not tested on GPUs: the tests simulate NCCL's error.
    """
    errors = nccl_errors(device)
    if errors is None:
        return nullcontext()

    def check() -> Exception | None:
        error = next((error for error in errors() if error != "SUCCESS"), None)
        if error == "TIMEOUT":
            return _timed_out(world, seconds, where())
        return None if error is None else ConnectionLost(f"NCCL's {error}")

    return _polled(check, end)


RUN_ENDED = "ended"
"""Key of the store of torchrun's agents that exists once a node has given up."""


def ended_key(attempt: int) -> str:
    """Key that exists once a node's processes of an attempt have ended, and will be restarted."""
    return f"attempts/{attempt}/ended"


def watch_other_nodes(seconds: float, end: EndProcess | None) -> AbstractContextManager[None]:
    """End this process soon after the processes of another node, or after `seconds` without an answer of node 0.

    Otherwise NCCL's collectives would wait until their timeout, and calls of the store for a quarter of an hour.
    """
    if end is None or LAUNCHER not in os.environ or os.environ["GROUP_WORLD_SIZE"] == "1":
        return nullcontext()
    silent = WaitTimedOut(f"run.rank_timeout_seconds: node 0 did not answer for {seconds:g} s", [0])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)

    def check() -> Exception | None:
        timer = threading.Timer(seconds, end, [silent])  # Without a connection, `check` does not return.
        timer.start()
        try:
            ended = store.check([RUN_ENDED]) or store.check([ended_key(attempt())])
            return OtherNodeEnded("the processes of another node have ended") if ended else None
        except RuntimeError:
            return ConnectionLost("the store of node 0 has ended")
        finally:
            timer.cancel()

    return _polled(check, end)
