"""Checkpoint files: written atomically, verified by checksum when read; the newest few are kept.

Each process writes its own files, in safetensors and JSON. PyTorch's distributed checkpoints store their index in a
pickle, which runs code when it is opened. Rank 0 writes to the checkpoint's directory itself.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from lean_finetune.core.atomic_files import atomic_directory, partial_directory, sha256_file, sync, write_errors
from lean_finetune.core.errors import UserError
from lean_finetune.distributed.processes import ControlChannel
from lean_finetune.model.files.safetensors_files import StoredTensor, stored_tensors, write_loaded
from lean_finetune.train.checkpoint.scratch_dir import (
    PARTS,
    RANKS,
    VALUES,
    Disk,
    find_disk,
    parts_and_hosts,
    rank_directory,
    read_values,
    send_missing_parts,
)

TENSORS, SUMS = "tensors.safetensors", "sha256.json"
NAME, NUMBER = "step-{:09d}", re.compile(r"step-(\d{9})")
"""A checkpoint's directory, by the number of finished optimizer steps."""
ROW_RANGES = "row_ranges"
"""Key of values.json: first row and full shape of sharded tensors."""

RowRanges = Mapping[str, tuple[int, tuple[int, ...]]]


@dataclass(frozen=True, kw_only=True)
class CheckpointTensor:
    """Locates the rows of a tensor. A process can read any range of rows without loading the others."""

    shape: tuple[int, ...]
    """Of the full tensor."""
    ranges: tuple[tuple[int, StoredTensor], ...]
    """First row of each stored range, and the stored tensor."""

    @property
    def dtype(self) -> torch.dtype:
        """Of all ranges."""
        return self.ranges[0][1].dtype

    def read(self) -> torch.Tensor:
        """Read the full tensor."""
        return self.read_rows(0, self.shape[0]) if self.shape else self.ranges[0][1].read()

    def read_rows(self, first: int, count: int) -> torch.Tensor:
        """Read a range of rows; no others are read from the disk."""
        rows = torch.empty((count, *self.shape[1:]), dtype=self.dtype)
        done = first
        for start, stored in sorted(self.ranges, key=lambda one: one[0]):
            end = min(start + stored.shape[0], first + count)
            if start <= done < end:
                rows[done - first : end - first] = stored.rows(done - start, end - done).read()
                done = end
        if done != first + count:
            raise RuntimeError(f"a checkpoint lacks rows {done} to {first + count} of a tensor of {self.shape}")
        return rows


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint."""

    path: Path
    values: Mapping[str, Any]
    """Of the first process, as passed to `write`."""

    @property
    def ranks(self) -> int:
        """Number of processes that wrote it."""
        return self.values[RANKS]

    def values_of(self, rank: int) -> Mapping[str, Any]:
        """Read the values of one process."""
        return self.values if rank == 0 else read_values(rank_directory(self.path, rank) / VALUES)

    def tensors(self) -> dict[str, CheckpointTensor]:
        """Return its tensors by name, not read yet."""
        found: dict[str, CheckpointTensor] = {}
        for rank in range(self.ranks):
            row_ranges = self.values_of(rank)[ROW_RANGES]
            for name, stored in stored_tensors(rank_directory(self.path, rank) / TENSORS).items():
                first, shape = row_ranges.get(name, (0, stored.shape))
                before = found[name].ranges if name in found else ()
                found[name] = CheckpointTensor(shape=tuple(shape), ranges=(*before, (first, stored)))
        return found


class _Dropped(Exception):
    """Leaves a context without an error for the user."""


class PendingCheckpoint:
    """A checkpoint in the page cache that is not on the disk yet; every method raises UserError if the disk refuses."""

    def __init__(self, store: "CheckpointStore", directory: Path, rename: ExitStack):
        """Of `store`; this process's files are in `directory`, and closing `rename` gives the checkpoint its name."""
        self._store, self._directory, self._rename = store, directory, rename

    def finish_rank(self) -> None:
        """Write checksums and flush this process's files. May run in another thread than the one that wrote."""
        with write_errors(self._directory):
            sums = {name: sha256_file(self._directory / name) for name in (TENSORS, VALUES)}
            # Last: a part with this file counts as complete.
            (self._directory / SUMS).write_text(json.dumps(sums))
            for name in (TENSORS, VALUES, SUMS):
                sync(self._directory / name)
            for directory in (self._directory, *self._directory.parents[:3]):  # The names of files and directories.
                sync(directory)

    def publish(self) -> None:
        """Publish it when all processes have finished. Called by the first process of a disk."""
        self._rename.close()

    def drop(self) -> None:
        """Remove it. Called by the first process of a disk."""
        with suppress(_Dropped), self._rename:
            raise _Dropped

    def finish(self) -> None:
        """Finish and publish it, for a run of one process."""
        with self._rename:
            self.finish_rank()
        self._store.remove_old()


class CheckpointStore:
    """The checkpoints of one run, in a directory that its processes share, or those of each node."""

    def __init__(
        self,
        directory: Path,
        keep: int,
        notify: Callable[[str], None],
        channel: ControlChannel | None = None,
        disk: Disk | None = None,
    ):
        """Keep the newest `keep`; `notify` gets a line for each damaged one; `channel` connects the processes."""
        self.directory, self.keep, self._notify = directory, keep, notify
        self.channel = channel or ControlChannel()
        self.disk = disk or find_disk(directory, self.channel)
        self.kept_step: int | None = None
        """A step whose checkpoint stays, however old it is."""

    def write(
        self,
        step: int,
        tensors: Mapping[str, torch.Tensor],
        values: Mapping[str, Any],
        row_ranges: RowRanges | None = None,
    ) -> PendingCheckpoint:
        """Write everything to the page cache; after that the tensors may change. All processes call this.

        The page cache is memory that the system takes back when training needs it.

        Raises:
            UserError: the disk refused.
        """
        path = self.directory / NAME.format(step)
        with ExitStack() as stack:
            directory = rank_directory(partial_directory(path) / path.name, self.channel.rank)
            refused: UserError | None = None
            if self.disk.is_led_here:
                try:
                    stack.enter_context(atomic_directory(path))
                except UserError as error:  # Raised once the others, which wait for the directory, know.
                    refused = error
            else:
                stack.enter_context(write_errors(directory))
            if failed := self.channel.failed_ranks(refused is not None):
                raise refused or UserError(f"{path}: cannot be written by process {failed[0]}; see its log")
            more = {ROW_RANGES: row_ranges or {}, **parts_and_hosts(self.disk, self.channel)}
            with self._fail_together():
                # The first process writes into the checkpoint's directory itself, which exists.
                directory.mkdir(exist_ok=self.channel.is_first)
                write_loaded(directory / TENSORS, tensors)
                saved_at = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
                (directory / VALUES).write_text(json.dumps({**values, **more, "saved_at": saved_at}))
            return PendingCheckpoint(self, directory, stack.pop_all())

    @contextmanager
    def _fail_together(self) -> Iterator[None]:
        """Raise an error of one process in all, once none of them writes any more: the first process then cleans up."""
        refused: OSError | None = None
        try:
            yield
        except OSError as error:
            refused = error
        if failed := self.channel.failed_ranks(refused is not None):
            raise refused or UserError(
                f"process {failed[0]} of {self.channel.size} could not write its files; see its log"
            )

    def newest(self) -> Checkpoint | None:
        """Return the newest checkpoint that all disks have finished; report newer ones, then remove them.

        A checkpoint that was finished but not renamed before a kill is renamed now. All processes call this, and each
        verifies a share of the files.

        Raises:
            UserError: the disk refused, or a part of the checkpoint is missing; nothing is removed.
        """
        leads = self.disk.is_led_here
        with write_errors(self.directory):
            had = self.channel.gather(int(any(self.directory.glob("*step-*"))))
            if leads:
                for unfinished in self.directory.glob(".*"):
                    _rename_if_finished(unfinished)
                    shutil.rmtree(unfinished)
            own = json.dumps(steps_in(self.directory) if leads else [])
            steps = {step for there in self.channel.gather_text(own) for step in json.loads(there)}
            found: Checkpoint | None = None
            for step in sorted(steps, reverse=True):
                path = self.directory / NAME.format(step)
                # Only the newest can lack parts because of a kill while writing, and only on disks that have files.
                writers = [rank for rank, (any_files,) in enumerate(had) if any_files and step == max(steps)]
                fault = send_missing_parts(path, (TENSORS, SUMS), writers, self.disk, self.channel)
                fault = fault or _fault(path, self.disk)
                damaged = self.channel.failed_ranks(fault is not None)
                if not damaged:
                    found = Checkpoint(path=path, values=read_values(path / VALUES))
                    break
                if leads:
                    what = fault or f"found by process {damaged[0]}"
                    rest = "using the one before it" if step > min(steps) else "and no older one is here"
                    self._notify(f"{path}: checkpoint cannot be used ({what}); {rest}")
            if leads:
                self.remove_newer(-1 if found is None else step)
            return found

    def of_step(self, step: int, earlier: Path | None = None) -> Checkpoint:
        """The checkpoint after `step` steps, here or in the directory of the `earlier` run. All processes call this.

        Raises:
            UserError: it is damaged or gone.
        """
        paths = [directory / NAME.format(step) for directory in (self.directory, earlier) if directory is not None]
        path = paths[self.channel.from_first(int(len(paths) > 1 and not paths[0].exists()))[0]]
        fault = send_missing_parts(path, (TENSORS, SUMS), (), self.disk, self.channel)
        fault = fault or _fault(path, self.disk)
        if self.channel.failed_ranks(fault is not None):
            raise UserError(
                f"train.keep: the best weights are those of {path}, which cannot be used ({fault or 'see another log'}"
                f"); delete {path.parent}, then the same command starts at the first step"
            )
        return Checkpoint(path=path, values=read_values(path / VALUES))

    def remove_newer(self, step: int) -> None:
        """Remove checkpoints after `step` steps."""
        for newer in steps_in(self.directory):
            if newer > step:
                shutil.rmtree(self.directory / NAME.format(newer))

    def has_step(self, step: int) -> bool:
        """Whether there is a checkpoint after `step` steps."""
        return (self.directory / NAME.format(step)).exists()

    def last_step(self) -> int | None:
        """Return the finished steps of the newest checkpoint, complete or not; None without one."""
        return next(reversed(steps_in(self.directory)), None)

    def remove_old(self, keep: int | None = None) -> None:
        """Remove all but the newest `keep` and that of `kept_step`; None = the number kept during training."""
        for step in steps_in(self.directory)[: -(keep or self.keep)]:
            if step != self.kept_step:
                shutil.rmtree(self.directory / NAME.format(step), ignore_errors=True)


def steps_in(directory: Path) -> list[int]:
    """Return the finished steps of each checkpoint in a directory, in order; other names are not looked at."""
    return sorted(int(found[1]) for path in directory.glob("step-*") if (found := NUMBER.fullmatch(path.name)))


def _rename_if_finished(partial: Path) -> None:
    """Give a checkpoint in a temporary directory its name, if every process of this disk had finished its files."""
    path = partial.with_name(partial.name.removeprefix(".").removesuffix(".partial"))
    written = partial / path.name
    try:
        one = next(written.rglob(VALUES))
        for rank in read_values(one)[PARTS]:
            read_values(rank_directory(written, int(rank)) / SUMS)
    except (OSError, KeyError, TypeError, ValueError, StopIteration):  # Unfinished: a file is missing or truncated.
        return
    if not path.exists():
        written.rename(path)


def _fault(path: Path, disk: Disk) -> str | None:
    """Verify this process's share of a checkpoint's files; return what is wrong, or None."""
    try:
        ranks = read_values(path / VALUES)[RANKS]
        if type(ranks) is not int or ranks < 1:
            return f"{VALUES} does not say how many processes wrote it"
        for rank in disk.share(range(ranks)):
            directory = rank_directory(path, rank)
            sums = read_values(directory / SUMS)
            if set(sums) != {TENSORS, VALUES}:
                return f"{SUMS} does not name its files"
            for name, expected in sums.items():
                if sha256_file(directory / name) != expected:
                    return f"{name} differs from its checksum"
    except FileNotFoundError as error:
        return f"{Path(error.filename).relative_to(path)} is missing"
    except (KeyError, TypeError, ValueError, OSError) as error:
        return f"its files cannot be read ({error})"
    return None
