"""Directories below scratch/: of unfinished runs, on one disk or those of several nodes, and of running processes."""

import hashlib
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast
from uuid import uuid4

import numpy as np
import psutil
import torch
import torch.distributed as dist

from cuda_memory.units import counted, readable_size
from lean_finetune.core.atomic_files import repo_root, write_errors, write_json
from lean_finetune.core.errors import UserError
from lean_finetune.core.file_locks import clear, lock_directory, unlock_directory
from lean_finetune.core.memory_limits import FILESYSTEM, oom_kills
from lean_finetune.core.regular_files import read_regular
from lean_finetune.distributed.processes import ControlChannel, wait_for_all

RECORD = "run.json"
"""In a run's directory: the fingerprint of the run, see `resume_run`."""
FINISHED = "finished"
"""In the directory of a run that has published its outputs: MD5 of its metrics file, as in dvc.lock."""
DVC_LOCK = Path("dvc.lock")


@dataclass(frozen=True, kw_only=True)
class RunDirectory:
    """Where a run keeps its checkpoints; `resume_run` chooses it."""

    directory: Path
    earlier: Path | None = None
    """Directory of another run to resume from; None: use its own checkpoints, or start at the first step."""
    record: Mapping[str, Any] | None = None
    """Content of `RECORD`; None: nothing is written."""


def scratch_root() -> Path:
    """Return the directory of all unfinished runs; runs in temporary copies share the checkout's."""
    return repo_root() / "scratch" / "train"


@contextmanager
def lock_run_directory(
    directory: Path,
    notify: Callable[[str], None],
    record: Mapping[str, Any] | None = None,
    *,
    starts_over: bool | None = None,
) -> Iterator[bool]:
    """Lock a run's directory for the block, and clear it if the block succeeds.

    A directory that is marked finished inside keeps its checkpoint until the next run starts: DVC has yet to record
    the outputs, and removes them if it is killed before. Finished or empty directories of other runs are removed now.

    Args:
        directory: the run's directory.
        notify: gets lines for the user.
        record: what is written to `RECORD`; None = nothing.
        starts_over: on a node with its own disk, what this yielded on node 0, which has dvc.lock; None on node 0.

    Yields:
        Whether there is no checkpoint, so that the run starts at the first step.

    Raises:
        UserError: another process has locked it, or the disk refused.
    """
    with write_errors(directory):
        lock = lock_directory(directory)
    if lock is None:
        raise UserError(
            f"{directory}: another process trains the same run; wait until it ends, or stop it: the same command then "
            "resumes from its checkpoint"
        )
    try:
        with write_errors(directory):
            _restart_finished(directory, record, starts_over)
            _remove_finished_runs(directory)
        if record is not None:
            write_json(directory / RECORD, record)
        _report_other_runs(directory, notify)
        yield not list(directory.glob("*step-*"))
        if not (directory / FINISHED).exists():
            clear(directory)
    finally:
        if not list(directory.glob("*step-*")):
            clear(directory)
        unlock_directory(directory, lock)


@contextmanager
def lock_earlier_run(directory: Path | None) -> Iterator[None]:
    """Lock the directory of another run from which this one resumes, and leave it unchanged."""
    if directory is None:
        yield
        return
    lock = lock_directory(directory)
    if lock is None:
        raise UserError(
            f"{directory}: another process trains the run to resume from; wait until it ends, or set run.resume=exact"
        )
    try:
        yield
    finally:
        unlock_directory(directory, lock)


def metrics_digest(metrics: Path) -> str:
    """The MD5 of a run's metrics file, as in dvc.lock."""
    return hashlib.md5(metrics.read_bytes(), usedforsecurity=False).hexdigest()


def mark_finished(directory: Path, digest: str) -> None:
    """Keep the directory's checkpoint until the next training starts; `digest` is that of the run's metrics."""
    with write_errors(directory):
        (directory / FINISHED).write_text(digest, encoding="ascii")


def _restart_finished(directory: Path, record: Mapping[str, Any] | None, starts_over: bool | None) -> None:
    """Run a finished training again, from its checkpoint.

    It starts at the first step if DVC has recorded its outputs, or if GPUs shared it in another way: resumed at its
    end, the run would execute no step in this way, and measure no memory.
    """
    marker = directory / FINISHED
    if not marker.exists():
        return
    if starts_over is None:
        digest = read_regular(marker).decode("ascii", "replace")  # Empty after a power failure.
        recorded = bool(digest) and DVC_LOCK.is_file() and digest in DVC_LOCK.read_text(encoding="utf-8")
        starts_over = recorded or (record is not None and _sharing_of(directory) != record["sharing"])
    if starts_over:
        for path in directory.glob("*step-*"):  # Before the marker: without it the checkpoint would be resumed.
            shutil.rmtree(path)
        clear(directory)
    marker.unlink(missing_ok=True)


def _sharing_of(directory: Path) -> Any:
    """How GPUs shared the run; None if its record has none, is damaged, or is missing, as after a kill in `clear`."""
    with suppress(OSError, ValueError):
        return read_values(directory / RECORD).get("sharing")
    return None


def read_values(path: Path) -> dict[str, Any]:
    """The JSON object in a file of an unfinished run.

    Raises:
        OSError: it is missing or no regular file.
        ValueError: it is damaged.
    """
    found = json.loads(read_regular(path))
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} has no JSON object")
    return found


def _remove_finished_runs(own: Path) -> None:
    """Remove directories of other runs that are finished or have no checkpoint."""
    for path in own.parent.glob(f"*/{RECORD}"):
        other = path.parent
        if other != own and _is_removable(other) and (lock := lock_directory(other)) is not None:
            # Asked again under the lock: a run may have begun in between.
            if _is_removable(other):
                clear(other)
            unlock_directory(other, lock)


def _is_removable(directory: Path) -> bool:
    """Whether no run would resume from it."""
    return (directory / FINISHED).exists() or not list(directory.glob("*step-*"))


def _report_other_runs(directory: Path, notify: Callable[[str], None]) -> None:
    """Report checkpoints of other unfinished runs: nothing removes those of abandoned runs."""
    others = [path for path in directory.parent.iterdir() if path != directory and list(path.glob("step-*"))]
    if others:
        size = sum(file.stat().st_size for path in others for file in path.glob("step-*/*"))
        notify(
            f"note: {directory.parent} has checkpoints of {counted(len(others), 'other unfinished training')} "
            f"({readable_size(size)}); delete the ones you no longer need"
        )


# Checkpoints of several nodes, on a shared disk or on a separate disk of each node.
#
# A process writes its part of a checkpoint to its node's disk. Before a run resumes, every disk receives the parts
# that it lacks, so that any process can read any part.

CHUNK_BYTES = 16 * 2**20
"""Bytes of one message: 10 ms at 10 Gbit/s."""
PROBE = "disk"
VALUES = "values.json"
RANKS, PARTS, HOSTS = "ranks", "parts", "hosts"
"""Its keys: number of processes that wrote, processes whose parts are on this disk, machine of each process."""


@dataclass(frozen=True)
class Disk:
    """The disk of a run's directory, as one process sees it."""

    rank: int
    ranks: Sequence[int]
    """Ranks that share it, in order."""
    size: int
    """Number of all processes."""

    @property
    def is_led_here(self) -> bool:
        """Whether this process locks and renames files for all that share the disk."""
        return self.rank == self.ranks[0]

    @property
    def is_shared(self) -> bool:
        """Whether all processes of the run share it."""
        return len(self.ranks) == self.size

    def share(self, parts: Sequence[int]) -> Sequence[int]:
        """The `parts` that this process verifies; the processes of a disk divide the work."""
        return parts[self.ranks.index(self.rank) :: len(self.ranks)]


def find_disk(directory: Path, channel: ControlChannel) -> Disk:
    """Find which processes share the disk of a directory: those that see a file that the first process writes there.

    Every other node is assumed to have a separate disk. All processes call this.

    Raises:
        UserError: the first process cannot write there.
    """
    if channel.size == 1:
        return Disk(0, (0,), 1)
    # A new token each time: a killed run may have left its file.
    token, probe = uuid4().hex, directory / PROBE
    if channel.is_first:
        with write_errors(probe):
            directory.mkdir(parents=True, exist_ok=True)
            probe.write_text(token)
    # This also waits until the file is written.
    expected = channel.gather_text(token if channel.is_first else "")[0]
    sees = probe.is_file() and probe.read_text() == expected
    found = channel.gather(-1 if sees else channel.node)
    if channel.is_first:
        probe.unlink()
    mine = found[channel.rank]
    return Disk(channel.rank, [rank for rank, one in enumerate(found) if one == mine], channel.size)


def parts_and_hosts(disk: Disk, channel: ControlChannel) -> dict[str, Any]:
    """For a checkpoint's values: the number of processes, those with parts on this disk, and each one's machine."""
    return {RANKS: channel.size, PARTS: list(disk.ranks), HOSTS: channel.gather_text(platform.node())}


def rank_directory(path: Path, rank: int) -> Path:
    """Return the directory of one process's files in a checkpoint."""
    return path / str(rank) if rank else path


def send_missing_parts(
    path: Path, names: Sequence[str], writers: Sequence[int], disk: Disk, channel: ControlChannel
) -> str | None:
    """Copy each part of a checkpoint to the disks that lack it; all processes call this.

    A part has the files `VALUES` and `names`; the last one marks it as complete. Returns why the checkpoint is
    incomplete, if its machine is here and a kill explains it: `writers` are the ranks on whose disks a process may have
    been killed while it wrote.

    Raises:
        UserError: a part is on a machine that is not here, or was lost; or a disk is full.
    """
    written: dict[str, Any] = {}
    with suppress(OSError, ValueError, StopIteration):  # Damaged: reported when checksums are compared.
        written = read_values(next(path.rglob(VALUES)))
    own = json.dumps([written.get(key) for key in (RANKS, PARTS, HOSTS)])
    known = map(json.loads, channel.gather_text(own))
    found: list[Any] | None = next((one for one in known if one[1] is not None), None)
    if found is None or not _are_parts(*found):
        return None
    ranks, parts, hosts = found
    if disk.is_shared and len(parts) == ranks:
        return None
    directories = [rank_directory(path, rank) for rank in range(ranks)]
    present = channel.gather(*(int((directory / names[-1]).exists()) for directory in directories))
    absent = [part for part in range(len(directories)) if not any(row[part] for row in present)]
    if absent:
        which, machines = f"process {', '.join(map(str, absent))}", {hosts[part]: None for part in absent}
        here = channel.gather_text(platform.node())
        lost = {machine for rank, machine in enumerate(here) if rank not in writers}
        if machines.keys() <= set(here) - lost:
            return f"{which} had not finished writing it"
        start = "" if machines.keys() <= set(here) else "start that machine with the others, "
        raise UserError(
            f"{path}: lacks what {which} wrote to the disk of {', '.join(machines)}; {start}copy those files to it on "
            f"any machine, delete it on all machines to use the checkpoint before it, or delete {path.parent} on all "
            "to start over"
        )
    refused: OSError | None = None
    for part, directory in enumerate(directories):
        source = next(rank for rank, row in enumerate(present) if row[part])
        writes = disk.is_led_here and not present[channel.rank][part]
        for name in (VALUES, *names) if not all(row[part] for row in present) else ():
            refused = _send_file(directory / name, source, channel, writes=writes and refused is None) or refused
    if failed := channel.failed_ranks(refused is not None):
        raise UserError(
            f"{path}: process {failed[0]} cannot write parts of it ({refused or 'see its log'}); free space"
        )
    return None


def _are_parts(ranks: Any, parts: Any, hosts: Any) -> bool:
    """Whether these are a number of processes, ranks with parts, and machines by rank: a damaged file has others."""
    lists = isinstance(parts, list) and isinstance(hosts, list)
    return type(ranks) is int and lists and len(hosts) == ranks and {*map(str, parts)} <= {*map(str, range(ranks))}


def _send_file(path: Path, source: int, channel: ControlChannel, *, writes: bool) -> OSError | None:
    """Send a file of process `source` to those that write it; return why this one could not."""
    partial = path.with_name(f"{path.name}.partial")
    wait_for_all()
    size = channel.gather(path.stat().st_size if channel.rank == source else 0)[source][0]
    with ExitStack() as stack:
        file: BinaryIO | None = None
        refused: OSError | None = None
        try:
            if writes:
                path.parent.mkdir(parents=True, exist_ok=True)
            if writes or channel.rank == source:
                opened = open(partial, "wb") if writes else open(path, "rb")  # noqa: SIM115 - closed by the stack
                file = cast(BinaryIO, stack.enter_context(opened))
        except OSError as error:
            refused = error
        for start in range(0, size, CHUNK_BYTES):
            chunk = torch.empty(min(CHUNK_BYTES, size - start), dtype=torch.uint8)
            if file is not None and not writes:
                chunk.numpy()[:] = np.frombuffer(file.read(len(chunk)), np.uint8)
            sent = chunk.to(channel.device)
            dist.broadcast(sent, src=source)
            try:
                if file is not None and writes:
                    file.write(sent.cpu().numpy().tobytes())
                    file.flush()
            except OSError as error:
                refused, file = error, None
        if file is not None and writes:
            try:
                os.fsync(file.fileno())
                partial.rename(path)
            except OSError as error:
                refused = error
    return refused


# Record the last step of each training process, so that the next run can report one that was killed.
#
# Each process has a directory with a small file and a lock. The process removes it when it ends by itself, also after
# an error. A directory whose lock is free belongs to a process that was killed or crashed, or whose machine went down.
# Process ids would not do: containers that share the disk, even with the same host name, use the same ones.

WRITE_SECONDS = 1.0
"""Least time between two writes; each takes about 0.1 ms."""
LAST_STEP = "last_step.json"
BOOT_ID = "proc/sys/kernel/random/boot_id"
"""Linux: changes at every start of the machine."""


@dataclass(frozen=True, kw_only=True)
class LastStep:
    """Content of the file."""

    host: str
    boot: str | None
    """Boot id of the machine; None where the system has none."""
    oom_kills: int | None
    """Processes of this container that the kernel's OOM killer had ended when the run started."""
    step: int | None
    """Optimizer step that started last; None before the first."""
    rss_bytes: int


class CrashMarker:
    """Writes the file of this process."""

    def __init__(self, directory: Path, notify: Callable[[str], None], root: Path, clock: Callable[[], float]):
        """Write to `directory`; `notify` gets a line if the disk refuses."""
        self.path = directory / LAST_STEP
        self._notify, self._clock = notify, clock
        self._process = psutil.Process()
        self._kills, self._boot = oom_kills(root), _boot_id(root)
        self._due = clock()
        self.step_started(None)

    def step_started(self, step: int | None) -> None:
        """Record the step, unless the last write is too recent."""
        if self._clock() < self._due:
            return
        self._due = self._clock() + WRITE_SECONDS
        last_step = LastStep(
            host=platform.node(),
            boot=self._boot,
            oom_kills=self._kills,
            step=step,
            rss_bytes=self._process.memory_info().rss,
        )
        partial = self.path.with_suffix(".partial")
        try:
            partial.write_text(json.dumps(asdict(last_step)), encoding="ascii")
            os.replace(partial, self.path)
        except OSError as error:  # No reason to end a training, but the next run will know less.
            self._due = float("inf")
            self._notify(f"warning: {self.path}: cannot be written ({error.strerror}); training continues")

    def remove(self) -> None:
        """Remove the file before the process exits without unwinding."""
        self.path.unlink(missing_ok=True)


@contextmanager
def crash_marker(
    directory: Path,
    notify: Callable[[str], None],
    *,
    reports: bool = True,
    root: Path = FILESYSTEM,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[CrashMarker]:
    """Report processes that crashed, then mark this one.

    Args:
        directory: parent of the directories of all processes.
        notify: gets one line for each crash.
        reports: whether this process reports crashes; one process per machine does.
        root: root of the file system.
        clock: monotonic seconds.
    """
    own = directory / uuid4().hex[:8]
    with write_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        for other in sorted(directory.iterdir()) if reports else ():
            if other.is_dir():
                _report_crash(other, notify, root)
        lock = lock_directory(own, waits=lambda: None)  # Another process may look into it before it is locked.
    assert lock is not None
    try:
        yield CrashMarker(own, notify, root, clock)
    finally:
        clear(own)
        unlock_directory(own, lock)


def _report_crash(directory: Path, notify: Callable[[str], None], root: Path) -> None:
    """Report the crashed process and remove its directory, unless it still runs or ran on another machine."""
    lock = lock_directory(directory)
    if lock is None:
        return
    try:
        last_step = LastStep(**read_values(directory / LAST_STEP))
        if last_step.host == platform.node():
            clear(directory)
            notify(_crash_note(last_step, root))
    except FileNotFoundError:  # It ended before its first write, or by itself just now.
        pass
    except (OSError, ValueError, TypeError):  # The file is never flushed, so a machine that goes down can damage it.
        clear(directory)
        notify(f"note: a previous training crashed or was killed; its record in {directory} is damaged")
    finally:
        unlock_directory(directory, lock)


def _crash_note(last_step: LastStep, root: Path) -> str:
    """Describe where a process ended and, as far as the system knows, why."""
    where = "while loading" if last_step.step is None else f"at optimizer step {last_step.step} or soon after"
    kills = oom_kills(root)
    if last_step.boot != _boot_id(root):
        why = "the machine has restarted since"
    elif kills is None or last_step.oom_kills is None:
        why = "it crashed or was killed; this system does not count kills for lack of memory"
    elif kills > last_step.oom_kills:
        why = (
            f"the kernel has since killed {kills - last_step.oom_kills} process(es) of this container for lack of RAM, "
            "very likely this one; raise the container's limit, or reduce what the run needs (host_bytes_predicted in "
            "data/estimate/figures.json)"
        )
    else:
        why = "it crashed or was killed, but not by the kernel for lack of RAM"
    return f"note: a previous training ended {where}, using {readable_size(last_step.rss_bytes)} of RAM: {why}"


def _boot_id(root: Path) -> str | None:
    """Return the machine's boot id; None where the system has none."""
    file = root / BOOT_ID
    return file.read_text(encoding="ascii").strip() if file.is_file() else None
