"""Checkpoints as files: whole or absent, checked when they are read, the last few kept."""

import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from stages.files import atomic_directory, sha256_file, told_in_one_line
from stages.model.tensor_files import StoredTensor, stored_tensors, write_held

TENSORS, VALUES, SUMS = "tensors.safetensors", "values.json", "sha256.json"
NAME = "step-{:09d}"
"""A checkpoint's directory, by the optimizer steps that are done in it."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One that was found whole."""

    path: Path
    values: Mapping[str, Any]
    """As `write` took them."""

    def tensors(self) -> dict[str, StoredTensor]:
        """Its tensors by name, none of them read."""
        return stored_tensors(self.path / TENSORS)


class Unfinished:
    """A checkpoint whose bytes the system has, but not yet the disk."""

    def __init__(self, store: "CheckpointStore", aside: Path, rest: ExitStack):
        """Of `store`; `rest` puts the directory `aside` in its place."""
        self._store, self._aside, self._rest = store, aside, rest

    def finish(self) -> None:
        """Checksums, disk, name; then drop the oldest. May run in another thread than the one that wrote.

        Raises:
            UserError: the disk refused.
        """
        with self._rest:
            sums = {name: sha256_file(self._aside / name) for name in (TENSORS, VALUES)}
            (self._aside / SUMS).write_text(json.dumps(sums))
        self._store.drop_old()


class CheckpointStore:
    """The checkpoints of one run, in one directory."""

    def __init__(self, directory: Path, keep: int, told: Callable[[str], None]):
        """Keep the last `keep`; `told` gets a line for each that is damaged."""
        self.directory, self._keep, self._told = directory, keep, told

    def write(self, step: int, tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> Unfinished:
        """Hand everything to the system; once this returns the tensors may change. `finish` makes it last.

        The copy that the rest is done from is in the system's cache of files: memory that it takes back when
        training needs it.

        Raises:
            UserError: the disk refused.
        """
        with ExitStack() as stack:
            aside = stack.enter_context(atomic_directory(self.directory / NAME.format(step)))
            write_held(aside / TENSORS, tensors)
            saved_at = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
            (aside / VALUES).write_text(json.dumps({**values, "saved_at": saved_at}))
            return Unfinished(self, aside, stack.pop_all())

    def newest(self) -> Checkpoint | None:
        """The newest that is whole; damaged ones are told of and removed, as is what was never finished.

        Raises:
            UserError: the disk refused.
        """
        with told_in_one_line(self.directory):
            for left in self.directory.glob(".*"):
                shutil.rmtree(left)
            for path in reversed(self._paths()):
                if fault := _fault(path):
                    self._told(f"{path}: checkpoint is damaged ({fault}); taking the one before it")
                    shutil.rmtree(path)
                    continue
                return Checkpoint(path=path, values=json.loads((path / VALUES).read_text()))
        return None

    def holds(self, step: int) -> bool:
        """Whether a checkpoint of so many steps is there."""
        return (self.directory / NAME.format(step)).exists()

    def last_step(self) -> int | None:
        """Steps done in the newest checkpoint, whole or not; None without one."""
        paths = self._paths()
        return int(paths[-1].name.rpartition("-")[2]) if paths else None

    def drop_old(self) -> None:
        """Remove all but the last few."""
        for path in self._paths()[: -self._keep]:
            shutil.rmtree(path, ignore_errors=True)

    def _paths(self) -> list[Path]:
        """Checkpoints in the order of their steps."""
        return sorted(self.directory.glob("step-*"))


def _fault(path: Path) -> str | None:
    """What is wrong with a checkpoint's files; None if nothing."""
    try:
        sums = json.loads((path / SUMS).read_text())
        if not isinstance(sums, dict) or set(sums) != {TENSORS, VALUES}:
            return f"{SUMS} does not name its files"
        for name, expected in sums.items():
            if sha256_file(path / name) != expected:
                return f"{name} differs from its checksum"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (ValueError, OSError) as error:
        return f"{SUMS} cannot be read ({error})"
    return None
