"""Several processes of one command, under torchrun's agent: what they say, how they end, and one error for all."""

import logging
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from stages.dist.world import World
from stages.endings import Interrupted
from stages.errors import UserError

DIRECTORY = "LEAN_FINETUNE_RANKS"
"""Variable of the environment that names the processes' directory; absent where the user started torchrun."""
LAUNCHER = "LEAN_FINETUNE_LAUNCHER"
"""Variable of the environment with the number of the process that started it."""
WAITED = ".waited"
"""Ending of a file beside the fault of a process that waited for the others in vain."""
TOLD = ".told"
"""Ending of a file of a process that told the user why it ended."""
LOCAL = "127.0.0.1"
LOOPBACK = "lo"
"""Linux' name of the interface of that address."""


def launch(module: str, arguments: Sequence[str], *, processes: int, directory: Path) -> None:
    """Run `python -m module` in several processes on this node, until all have ended.

    The first shows what it says; what another says, and every traceback, is in `directory`, `<rank>.log`.

    Args:
        module: the entry.
        arguments: its command line.
        processes: how many.
        directory: emptied at the start.

    Raises:
        UserError: one of them failed: what it said first, or where its traceback is.
        Interrupted: a signal came, and was handed on to all.
    """
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    os.environ[DIRECTORY], os.environ[LAUNCHER] = str(directory.resolve()), str(os.getpid())
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
        raise (_first_fault(directory, processes) or UserError(_ended(error, directory))) from None
    except SignalException as stopped:
        if (directory / f"0{TOLD}").exists():
            raise SystemExit(128 + stopped.sigval) from None
        raise Interrupted(stopped.sigval) from None
    finally:
        logging.disable(logging.NOTSET)


def launcher() -> int | None:
    """The process of `launch` that started this one; None for a process that was started otherwise."""
    number = os.environ.get(LAUNCHER)
    return None if number is None else int(number)


def _first_fault(directory: Path, processes: int) -> UserError | None:
    """The fault of the process that met one of the user's first."""
    faults = sorted(directory.glob("*.fault"), key=lambda path: (path.stat().st_mtime_ns, path.name))
    if not faults:
        return None
    own = [path for path in faults if not path.with_suffix(WAITED).exists()]
    message, *details = (own or faults)[0].read_text(encoding="utf-8").splitlines()
    absent = sorted({str(rank) for rank in range(processes)} - {path.stem for path in faults})
    if absent and not own:
        message += f"; the one that did not come: process {', '.join(absent)}"
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


class WaitedInVain(UserError):
    """A process waited too long for the others: it is they that are at fault."""


@contextmanager
def as_one_of_many(world: World) -> Iterator[None]:
    """In a process that `launch` started: output apart, and a fault left for it to tell. Elsewhere nothing.

    Raises:
        SystemExit: with code 1 after any fault, and with that of a signal.
    """
    where = os.environ.get(DIRECTORY)
    if where is None or world.size == 1:
        yield
        return
    log = Path(where) / f"{world.rank}.log"
    if not world.leads:
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        for stream in (1, 2):
            os.dup2(handle, stream)
        os.close(handle)
    try:
        yield
    except Interrupted as ending:  # `launch` tells it.
        sys.exit(ending.exit_code)
    except SystemExit:
        (Path(where) / f"{world.rank}{TOLD}").touch()
        raise
    except UserError as fault:
        aside = Path(where) / f".{world.rank}"
        aside.write_text("\n".join((" ".join(str(fault).split()), *fault.details)), encoding="utf-8")
        if isinstance(fault, WaitedInVain):
            (Path(where) / f"{world.rank}{WAITED}").touch()
        aside.rename(Path(where) / f"{world.rank}.fault")
        sys.exit(1)
    except Exception:
        with open(log, "a", encoding="utf-8") as file:
            traceback.print_exc(file=file)
        sys.exit(1)
