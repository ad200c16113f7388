"""Checkpoints as files: whole or absent, checked when they are read, the last few kept.

Each process writes a part of its own, in plain safetensors and JSON: PyTorch's distributed checkpoints keep what is
where in a pickle, which runs code when it is opened. The part of the first process is the directory itself.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from lean_finetune.core.atomic_files import atomic_directory, bench_of, sha256_file, sync, told_in_one_line
from lean_finetune.core.errors import UserError
from lean_finetune.distributed.control_messages import ControlChannel
from lean_finetune.model.safetensors_files import stored_tensors, write_loaded
from lean_finetune.train.checkpoint.stored_tensor import Kept

TENSORS, VALUES, SUMS = "tensors.safetensors", "values.json", "sha256.json"
NAME = "step-{:09d}"
"""A checkpoint's directory, by the optimizer steps that are done in it."""
PIECES, PARTS = "pieces", "parts"
"""Of the values: first row and whole shape of tensors that are rows of larger ones; how many processes wrote."""

Pieces = Mapping[str, tuple[int, tuple[int, ...]]]


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One that was found whole."""

    path: Path
    values: Mapping[str, Any]
    """As the first process gave them to `write`."""

    @property
    def parts(self) -> int:
        """Processes that wrote it."""
        return self.values[PARTS]

    def values_of(self, part: int) -> Mapping[str, Any]:
        """As one of the processes gave them."""
        return self.values if part == 0 else json.loads((part_of(self.path, part) / VALUES).read_text())

    def tensors(self) -> dict[str, Kept]:
        """Its tensors by name, none of them read."""
        found: dict[str, Kept] = {}
        for part in range(self.parts):
            pieces = self.values_of(part)[PIECES]
            for name, stored in stored_tensors(part_of(self.path, part) / TENSORS).items():
                first, shape = pieces.get(name, (0, stored.shape))
                before = found[name].pieces if name in found else ()
                found[name] = Kept(shape=tuple(shape), pieces=(*before, (first, stored)))
        return found


def part_of(path: Path, rank: int) -> Path:
    """Where one process's files are."""
    return path / str(rank) if rank else path


class _Dropped(Exception):
    """Leaves what was begun without a fault."""


class Unfinished:
    """A checkpoint whose bytes the system has, but not yet the disk."""

    def __init__(self, store: "CheckpointStore", part: Path, rest: ExitStack):
        """Of `store`; this process's files are in `part`, and `rest` puts the checkpoint in its place."""
        self._store, self._part, self._rest = store, part, rest

    def finish_part(self) -> None:
        """Checksums and disk of this process's files. May run in another thread than the one that wrote.

        Raises:
            UserError: the disk refused.
        """
        with told_in_one_line(self._part):
            sums = {name: sha256_file(self._part / name) for name in (TENSORS, VALUES)}
            (self._part / SUMS).write_text(json.dumps(sums))
            for name in (TENSORS, VALUES, SUMS):
                sync(self._part / name)

    def publish(self) -> None:
        """Give it its name once all parts are finished; then drop the oldest. For the first process.

        Raises:
            UserError: the disk refused.
        """
        self._rest.close()
        self._store.drop_old()

    def drop(self) -> None:
        """Remove it. For the first process."""
        with suppress(_Dropped), self._rest:
            raise _Dropped

    def finish(self) -> None:
        """All of it, for a process on its own.

        Raises:
            UserError: the disk refused.
        """
        with self._rest:
            self.finish_part()
        self._store.drop_old()


class CheckpointStore:
    """The checkpoints of one run, in one directory that all its processes see."""

    def __init__(self, directory: Path, keep: int, told: Callable[[str], None], channel: ControlChannel | None = None):
        """Keep the last `keep`; `told` gets a line for each that is damaged; `channel` are the processes."""
        self.directory, self.keep, self._told = directory, keep, told
        self.channel = channel or ControlChannel()

    def write(
        self, step: int, tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any], pieces: Pieces | None = None
    ) -> Unfinished:
        """Hand everything to the system; once this returns the tensors may change. `finish` makes it last.

        The copy that the rest is done from is in the system's cache of files: memory that it takes back when
        training needs it. Several processes call this together.

        Raises:
            UserError: the disk refused.
        """
        path = self.directory / NAME.format(step)
        with ExitStack() as stack:
            part = part_of(bench_of(path) / path.name, self.channel.rank)
            refused: UserError | None = None
            if self.channel.is_first:
                try:
                    stack.enter_context(atomic_directory(path))
                except UserError as error:  # Not raised before the others, who wait for the directory, know.
                    refused = error
            if self.channel.from_first(int(refused is not None)) == [1]:
                raise refused or UserError(f"{path}: cannot be written by the first process, which says why")
            if not self.channel.is_first:
                stack.enter_context(told_in_one_line(part))
            with self._left_together():
                part.mkdir(exist_ok=self.channel.is_first)
                write_loaded(part / TENSORS, tensors)
                saved_at = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
                more = {PIECES: pieces or {}, PARTS: self.channel.size, "saved_at": saved_at}
                (part / VALUES).write_text(json.dumps({**values, **more}))
            return Unfinished(self, part, stack.pop_all())

    @contextmanager
    def _left_together(self) -> Iterator[None]:
        """What the disk refuses one process inside is raised in all, once no other writes there: the first will tidy.

        Raises:
            OSError: this process was refused.
            UserError: another one was.
        """
        refused: OSError | None = None
        try:
            yield
        except OSError as error:
            refused = error
        failed = [rank for rank, (bad,) in enumerate(self.channel.gather_after_work(int(refused is not None))) if bad]
        if refused is not None:
            raise refused
        if failed:
            raise UserError(
                f"process {failed[0]} of {self.channel.size} could not write its part, and says why in its log"
            )

    def newest(self) -> Checkpoint | None:
        """The newest that is whole; damaged ones are told of and removed, as is what was never finished.

        What was finished, and not yet given its name when the run was killed, is given it now. Several processes call
        this together, and each checks a share of the files.

        Raises:
            UserError: the disk refused.
        """
        leads = self.channel.is_first
        with told_in_one_line(self.directory):
            if leads:
                for left in self.directory.glob(".*"):
                    _name_finished(left)
                    shutil.rmtree(left)
            while True:
                (step,) = self.channel.from_first(-1 if (last := self.last_step()) is None else last)
                if step < 0:
                    return None
                path = self.directory / NAME.format(step)
                fault = _fault(path, self.channel)
                damaged = [
                    rank for rank, (bad,) in enumerate(self.channel.gather_after_work(int(fault is not None))) if bad
                ]
                if not damaged:
                    return Checkpoint(path=path, values=json.loads((path / VALUES).read_text()))
                if leads:
                    what = fault or f"process {damaged[0]} found it so"
                    self._told(f"{path}: checkpoint is damaged ({what}); taking the one before it")
                    shutil.rmtree(path)

    def holds(self, step: int) -> bool:
        """Whether a checkpoint of so many steps is there."""
        return (self.directory / NAME.format(step)).exists()

    def last_step(self) -> int | None:
        """Steps done in the newest checkpoint, whole or not; None without one."""
        return next(reversed(steps_in(self.directory)), None)

    def drop_old(self, keep: int | None = None) -> None:
        """Remove all but the last `keep`; None = as many as are kept while training runs."""
        for step in steps_in(self.directory)[: -(keep or self.keep)]:
            shutil.rmtree(self.directory / NAME.format(step), ignore_errors=True)


def steps_in(directory: Path) -> list[int]:
    """Optimizer steps done in each checkpoint of a directory, in order."""
    return sorted(int(path.name.rpartition("-")[2]) for path in directory.glob("step-*"))


def _name_finished(bench: Path) -> None:
    """Give the checkpoint that was made at `bench` its name, if every process had finished its part."""
    path = bench.with_name(bench.name.removeprefix(".").removesuffix(".partial"))
    made = bench / path.name
    try:
        for part in range(json.loads((made / VALUES).read_text())[PARTS]):
            json.loads((part_of(made, part) / SUMS).read_text())
    except (OSError, KeyError, TypeError, ValueError):  # It was not: a file is missing, or cut off.
        return
    if not path.exists():
        made.rename(path)


def _fault(path: Path, channel: ControlChannel) -> str | None:
    """What is wrong with this process's share of a checkpoint's files; None if nothing."""
    try:
        if channel.is_first and (fault := _fault_of_part(path)):
            return fault
        parts = json.loads((path / VALUES).read_text())[PARTS]
        for part in range(1, parts):
            if part % channel.size == channel.rank and (fault := _fault_of_part(part_of(path, part))):
                return fault
    except FileNotFoundError as error:
        return f"{Path(error.filename).relative_to(path)} is missing"
    except (KeyError, TypeError, ValueError, OSError) as error:
        return f"its files cannot be read ({error})"
    return None


def _fault_of_part(part: Path) -> str | None:
    """What is wrong with the files of one process."""
    sums = json.loads((part / SUMS).read_text())
    if not isinstance(sums, dict) or set(sums) != {TENSORS, VALUES}:
        return f"{SUMS} does not name its files"
    for name, expected in sums.items():
        if sha256_file(part / name) != expected:
            return f"{name} differs from its checksum"
    return None
