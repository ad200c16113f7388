"""What the loop tells of its steps, so that a run can be kept."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

from lean_finetune.step.batches import Batch
from lean_finetune.train.checkpoint.training_state import Running


class Keeper:
    """What the loop tells of its steps; this one keeps nothing."""

    first_step = 0
    """The optimizer step to begin with."""
    measures_load = True
    """Whether figures of memory begin here: they do not go on from an earlier process's."""

    def resume(self, run: Running, steps: int) -> None:
        """Put a run of so many `steps` that was just loaded where `first_step` begins."""

    def keeping(self, run: Running) -> AbstractContextManager[None]:
        """The context of all steps."""
        return nullcontext()

    def step_done(self, run: Running) -> None:
        """Call after a step, when its row is in `run.curves`."""

    def all_done(self, run: Running) -> None:
        """Call after the last step, also where an earlier process did it."""

    def between(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The step's batches, between two of which it may be left."""
        return batches


NOTHING_KEPT = Keeper()
