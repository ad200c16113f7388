"""Checkpoint hooks of the training loop."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from lean_finetune.core.errors import UserError
from lean_finetune.step.batches import Batch
from lean_finetune.train.checkpoint.training_state import TrainingRun


class CheckpointHooks:
    """Hooks that the training loop calls; this class writes no checkpoint."""

    first_step = 0
    """First optimizer step to run."""
    directories: Sequence[Path] = ()
    """The unfinished run's directory, then that of the run it resumes if that is another."""
    measures_load = True
    """Whether memory figures start here. If not, they continue those of an earlier process."""

    def resume(self, run: TrainingRun, steps: int) -> None:
        """Restore a run of `steps` steps, which was just loaded, to the start of `first_step`."""

    def saving_on_stop(self, run: TrainingRun) -> AbstractContextManager[None]:
        """Return the context of all steps; a stop or an error inside writes a last checkpoint."""
        return nullcontext()

    def naming_kept(self, kind: type[UserError] = UserError) -> AbstractContextManager[None]:
        """Return a context that adds to an error of this kind from which checkpoint the run can be resumed."""
        return nullcontext()

    def after_step(self, run: TrainingRun) -> bool:
        """Write a checkpoint if one is due, and return whether it is; call when the step's row is in `run.curves`."""
        return False

    def after_last_step(self, run: TrainingRun) -> None:
        """Write the last checkpoint; called even if an earlier process ran all steps."""

    def between(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Return the batches of a step; a stop may be raised between two."""
        return batches


NO_CHECKPOINTS = CheckpointHooks()
