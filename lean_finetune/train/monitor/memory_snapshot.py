"""Record the history of CUDA's allocator during training, and write it (run.memory_snapshot).

`lean-finetune snapshot FILE` explains the file. Not measured on a GPU: the tests replace the two functions of PyTorch
that record and read the history.

Recording takes no GPU memory. Of each allocation PyTorch stores the Python stack, in 2 us by its documentation, while
the GPU still computes what was launched before. The lines of a stack are looked up when the file is written: with C++
frames that took 461 s, without them 4 s (pytorch/torchtitan#3628).
"""

import shlex
from collections.abc import Callable
from pathlib import Path

import torch

from lean_finetune.config.field_types import MemorySnapshot
from lean_finetune.core.atomic_files import atomic_path
from lean_finetune.core.errors import UserError
from lean_finetune.distributed.processes import World

MAX_ENTRIES = 100_000
"""Latest actions of the allocator that are stored, about three per tensor; the file then has about 21 MiB."""
FIRST_STEPS = 3
"""Steps after which `first_steps` writes its file."""
OOM_FILE, FIRST_STEPS_FILE = "oom_snapshot", "first_steps_snapshot"


class MemorySnapshots:
    """Records from its creation on, and writes snapshots to a directory; does nothing on a CPU or with `never`."""

    def __init__(
        self,
        choice: MemorySnapshot,
        device: torch.device,
        directory: Path,
        world: World,
        notify: Callable[[str], None],
    ):
        """Start recording; create it before the model is loaded.

        Raises:
            UserError: `first_steps` cannot be done on this device or with this allocator.
        """
        self._directory, self._notify = directory, notify
        self._suffix = "" if world.size == 1 else f"_rank{world.rank}"
        self._steps = 0
        obstacle = _obstacle(device)
        if choice == "first_steps" and obstacle is not None:
            raise UserError(f"run.memory_snapshot: first_steps records PyTorch's CUDA allocator; {obstacle}; use never")
        self._records = choice != "never" and obstacle is None
        self._first_steps_are_due = choice == "first_steps"
        if self._records:
            torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=MAX_ENTRIES)

    def step_started(self) -> None:
        """Write the first steps once they are finished."""
        self._steps += 1
        if self._steps > FIRST_STEPS:
            self.close()

    def close(self) -> None:
        """Write the first steps of a run that has ended, if they are not written yet."""
        if self._first_steps_are_due and self._steps > 0:
            self._first_steps_are_due = False
            path = self.write(FIRST_STEPS_FILE)
            if path is not None:
                command = shlex.join(["lean-finetune", "snapshot", str(path)])
                self._notify(f"note: explain the memory of the first steps with: {command}")

    def write(self, name: str) -> Path | None:
        """Write all that is recorded; return the file, or None without one. A fault is reported, never raised."""
        if not self._records:
            return None
        path = self._directory / f"{name}{self._suffix}.pickle"
        try:
            with atomic_path(path) as temporary:
                torch.cuda.memory._dump_snapshot(str(temporary))
        except Exception as error:  # Neither ends a training nor hides the error that ends it.
            self._notify(f"warning: {path}: no snapshot of the memory was written ({error})")
            return None
        return path


def _obstacle(device: torch.device) -> str | None:
    """Why there is no history to record; None if there is one."""
    if device.type != "cuda":
        return "this run trains on the CPU"
    backend = torch.cuda.get_allocator_backend()
    return None if backend == "native" else f"this run uses {backend}"
