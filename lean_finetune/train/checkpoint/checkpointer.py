"""When checkpoints are saved, and how the loop resumes from one."""

import math
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuda_memory.units import counted, readable_size
from lean_finetune.core.errors import UserError
from lean_finetune.step.batches import Batch
from lean_finetune.step.offload.disk_weights import DiskFault
from lean_finetune.step.run_checks import Diverged, refuse_broken_weights
from lean_finetune.train.checkpoint.checkpoint_files import Checkpoint, CheckpointStore, PendingCheckpoint, steps_in
from lean_finetune.train.checkpoint.scratch_dir import mark_finished, metrics_digest
from lean_finetune.train.checkpoint.training_state import (
    TrainingRun,
    layout_of,
    local_tensors,
    plain_values,
    restore_state,
    restore_weights,
    row_ranges,
    tensors_to_store,
)
from lean_finetune.train.monitor.out_of_memory import TrainingOutOfMemory
from lean_finetune.train.process.stop_signals import Stopped, StopRequest


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

    def naming_last_checkpoint(self, kind: type[UserError] = UserError) -> AbstractContextManager[None]:
        """Return a context that adds to an error of this kind from which checkpoint the run can be resumed."""
        return nullcontext()

    def after_step(self, run: TrainingRun, kept: int | None = None) -> bool:
        """Write a checkpoint if one is due, and return whether it is; call when the step's row is in `run.curves`.

        `kept` is the step whose weights the run keeps so far, None if those of the last step.
        """
        return False

    def after_last_step(self, run: TrainingRun, kept: int | None = None) -> None:
        """Write the last checkpoint, then restore the weights of `kept`; called even if no step was left to run."""
        if kept not in (None, run.step):
            raise ValueError("only a checkpoint has the weights of an earlier step")

    def between(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Return the batches of a step; a stop may be raised between two."""
        return batches


NO_CHECKPOINTS = CheckpointHooks()


# Check free disk space for checkpoints and weights before the first step, not when the disk is full.


@dataclass(frozen=True, kw_only=True)
class DiskSpace:
    """What a training writes at its end, and where."""

    out: Path
    """Directory of the trained weights."""
    merged_bytes: int
    """Size of the merged model; 0 if none is written."""
    enforce: bool
    """Refuse a run without enough space (estimate.enforce)."""
    notify: Callable[[str], None]
    """Gets a line for the user."""
    kept: int = 0
    """Checkpoints that stay until the end besides the newest ones (train.keep=best: 1)."""

    def check(self, checkpoints: Path, *, trained_bytes: int, checkpoint_bytes: int, there: int, most: int) -> None:
        """Refuse a run whose last outputs do not fit; warn if `most` checkpoints do not. For the first process.

        The end of training keeps the last checkpoint and those that stay, and then writes the weights.

        Args:
            checkpoints: their directory.
            trained_bytes: size of the saved weights.
            checkpoint_bytes: size of one checkpoint.
            there: existing checkpoints of an earlier process.
            most: checkpoints on disk at the same time: a new one is complete before the oldest is removed.
        """
        weights = trained_bytes + self.merged_bytes
        here, at_out = _existing(checkpoints), _existing(self.out)
        free, free_at_out = shutil.disk_usage(here).free, shutil.disk_usage(at_out).free
        same_disk = here.stat().st_dev == at_out.stat().st_dev
        last = checkpoint_bytes * (1 + self.kept - there)  # Older ones are removed first and free their space.
        if self.enforce and (weights + (last if same_disk else 0) > free_at_out or last > free):
            elsewhere = "" if same_disk else f" there and {readable_size(free)} for {checkpoints}"
            raise DiskFault(
                f"{self.out}: the disk has too little free space for the end of training: {readable_size(weights)} of "
                f"weights and {readable_size(checkpoint_bytes)} of a last checkpoint; {readable_size(free_at_out)} are "
                f"free{elsewhere}; free space, then rerun, or set estimate.enforce=false"
            )
        if checkpoint_bytes * (most - there) > free:
            self.notify(
                f"warning: run.keep_checkpoints: up to {counted(most, 'checkpoint')} of "
                f"{readable_size(checkpoint_bytes)} can be on the disk at a time, {there} already, and "
                f"{readable_size(free)} are free for {checkpoints}; a checkpoint that does not fit is skipped and the "
                "previous one stays; free space, or lower it"
            )


def trained_bytes(run: TrainingRun) -> int:
    """Return the size of all trained weights as they are saved."""
    pairs = zip(run.parallel.trained_parameters(), run.parallel.slices(), strict=True)
    return sum(math.prod(piece.full_shape) * parameter.element_size() for (_, parameter), piece in pairs)


def _existing(path: Path) -> Path:
    """Return the path or its nearest existing parent."""
    return next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())


# Write checkpoints during training, and resume from the newest one.
#
# The training loop waits only until the bytes are in the page cache. Checksums and flushing follow in a thread. When a
# checkpoint is due depends on the clock and on what the last one cost, and never changes a result.
#
# Several processes write, publish and stop after the same step: after each step they exchange whether they got a stop
# signal and whether they are still writing a checkpoint. The first process's clock decides when one is due. A
# checkpoint gets its name once the files of all processes are on the disk. If one process fails alone, earlier
# checkpoints remain.

ONE_PROCESS = layout_of(1, "none")
MOST_TIME_SHARE = 0.02
"""Largest share of the time that checkpoints may take: the next one comes later after an expensive one."""


class Checkpointer(CheckpointHooks):
    """Writes and resumes the checkpoints of a run. Made by `open_checkpointer`, used by the loop."""

    def __init__(
        self,
        store: CheckpointStore,
        *,
        seconds: float | None,
        stop: StopRequest,
        notify: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        layout: Mapping[str, Any] = ONE_PROCESS,
        earlier: Path | None = None,
        disk_space: DiskSpace | None = None,
    ):
        """Find the newest checkpoint of an earlier process.

        Args:
            store: the checkpoint files.
            seconds: between two checkpoints; None = only on a stop.
            stop: set by signals.
            notify: gets lines for the user.
            clock: monotonic seconds.
            layout: how GPUs share the run.
            earlier: directory of another run to resume from if this one has no checkpoint.
            disk_space: what else the run will write; None = nothing.
        """
        self._store, self._channel = store, store.channel
        self._seconds, self._notify, self._clock = seconds, notify, clock
        self._stop, self._earlier, self._disk_space = stop, earlier, disk_space
        self.directories = (store.directory,) if earlier is None else (store.directory, earlier)
        self._found = store.newest()
        if self._found is None and earlier is not None:
            self._found = CheckpointStore(earlier, store.keep, notify, store.channel, store.disk).newest()
        self.first_step = 0 if self._found is None else self._found.values["step"]
        self.measures_load = self._found is None or self._found.values["layout"] != layout
        self._thread: threading.Thread | None = None
        self._pending: PendingCheckpoint | None = None
        self._unsettled = self._failed = False
        """The last checkpoint: not yet published or dropped by all (equal in all); this process could not write it."""
        self._spent = 0.0
        """Seconds that the last checkpoint took from training, or from a CPU core that training may use."""
        self._due = clock() + (seconds or 0.0)

    def resume(self, run: TrainingRun, steps: int) -> None:
        """Restore the checkpoint that was found, then check the free disk space."""
        if self._found is not None:
            found, self._found = self._found, None
            self._restore(found, run, steps)
        if self._disk_space is None:
            return
        own_bytes = sum(tensor.nbytes for tensor in tensors_to_store(local_tensors(run)).values())
        sizes = self._channel.gather_after_work(own_bytes)
        if self._channel.is_first:
            self._disk_space.check(
                self._store.directory,
                trained_bytes=trained_bytes(run),
                checkpoint_bytes=sum(size for (size,) in sizes),
                there=len(steps_in(self._store.directory)),
                most=self._disk_space.kept + (1 if self._seconds is None else self._store.keep + 1),
            )

    def _restore(self, found: Checkpoint, run: TrainingRun, steps: int) -> None:
        try:
            restore_state(run, found.tensors(), [found.values_of(rank) for rank in range(found.ranks)])
        except (RuntimeError, LookupError, TypeError) as error:
            if self._earlier is None:
                raise
            raise UserError(
                f"run.resume: compatible needs a checkpoint that this code can read; the one in {found.path} differs "
                f"({error}); set run.resume=exact to start at the first step"
            ) from error
        saved_at, layout = found.values["saved_at"], found.values["layout"]
        self._notify(f"train: resumed at optimizer step {run.step} of {steps} (checkpoint of {saved_at})")
        if self.measures_load:
            self._notify(
                f"note: the checkpoint is of {layout['gpus']} GPU(s) with train.sharding={layout['sharding']}: "
                "its steps equal those of this run except for rounding, and memory is measured from here on"
            )

    def between(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Stop between two batches on request, unless other processes wait for each of them."""
        return self._stop.between(batches) if self._channel.size == 1 else batches

    @contextmanager
    def saving_on_stop(self, run: TrainingRun) -> Iterator[None]:
        """Make a signal inside wait for the end of a step or batch, then write a last checkpoint.

        Raises:
            Stopped: a signal came.
            UserError: a loss, gradient or weight was not finite, or memory ran out; with the last checkpoint's step.
        """
        try:
            with self._stop.deferred():
                yield
            self._check_stop()
        except Stopped:
            self._save_last(run)
            raise
        except Diverged as error:
            hint = "and fails here again; changed parameters start at the first step"
            raise UserError(f"{error}; {self.resume_hint()} {hint}") from None
        except TrainingOutOfMemory as error:
            # Random states are also those of the last finished step. Other processes may be inside a step.
            if error.weights_intact and self._channel.size == 1:
                self._save_last(run)
            raise UserError.of_code(error.exit_code, str(error), *error.details, self.resume_hint()) from None

    def after_step(self, run: TrainingRun, kept: int | None = None) -> bool:
        """Write a checkpoint if one is due, or if the run keeps this step's weights; return whether it does.

        Raises:
            DiskFault: the weights that the run keeps cannot be written.
            Stopped: a signal came, in any process.
            Diverged: weights are not finite.
        """
        # All must begin the same checkpoint: none if one still writes, else as the first one's clock says.
        status = self._channel.gather(int(self._is_busy()), int(self.is_due()))
        self._store.kept_step, starts = kept, kept == run.step
        if not any(busy for busy, _ in status):
            self._settle()
            starts = starts or bool(status[0][1])
        if starts:
            self._start_write(run)
        if kept == run.step:
            self._settle()
            if self._channel.failed_ranks(self._failed):
                raise DiskFault(f"train.keep: best needs a checkpoint of optimizer step {kept}; free disk space")
        self._check_stop()
        return starts

    def mark_finished(self, metrics: Path | None) -> None:
        """Keep the last checkpoint until DVC has recorded `metrics`: their file in process 0 under DVC, else None."""
        digest = self._channel.gather_text("" if metrics is None else metrics_digest(metrics))[0]
        if digest and self._store.disk.is_led_here and not self._channel.is_first:
            mark_finished(self._store.directory, digest)
        self._channel.gather_after_work(0)
        if digest and self._channel.is_first:  # Last: its marker decides for all disks when the run is started again.
            mark_finished(self._store.directory, digest)

    def after_last_step(self, run: TrainingRun, kept: int | None = None) -> None:
        """Keep only the end of training: a kill or a full disk while publishing then costs no step.

        The run's weights become those of step `kept`, whose checkpoint stays too.
        """
        self._store.kept_step = kept
        self._save_last(run)
        if self._store.disk.is_led_here and self._store.has_step(run.step):
            self._store.remove_old(keep=1)
        if kept not in (None, run.step):
            restore_weights(run, self._store.of_step(kept, self._earlier).tensors())

    def is_due(self) -> bool:
        """Whether a checkpoint is due and the last one is finished."""
        return self._seconds is not None and not self._is_busy() and self._clock() >= self._due

    def _is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _check_stop(self) -> None:
        """Stop if any process got a stop signal."""
        numbers = [number for (number,) in self._channel.gather(self._stop.signal_number or 0) if number]
        if numbers:
            raise Stopped(numbers[0])

    def _save_last(self, run: TrainingRun) -> None:
        """Write a checkpoint of the finished steps, and wait for it."""
        self._settle()
        # The first process decides, since all take part in a checkpoint.
        if run.step and not self._channel.from_first(int(self._store.has_step(run.step)))[0]:
            self._start_write(run)
            self._settle()

    def resume_hint(self) -> str:
        """Say from which checkpoint the run can be resumed."""
        self.wait()
        step = self._store.last_step()
        if step is not None or self._earlier is not None:
            which = f"in {self._earlier}" if step is None else f"of optimizer step {step}"
            return f"the checkpoint {which} is kept: the same command resumes from it"
        return "no checkpoint was made: the same command starts at the first step"

    @contextmanager
    def naming_last_checkpoint(self, kind: type[UserError] = UserError) -> Iterator[None]:
        """Add to an error of this kind inside from which checkpoint the run can be resumed."""
        try:
            yield
        except kind as error:
            raise UserError.of_code(error.exit_code, f"{error}; {self.resume_hint()}", *error.details) from None

    def wait(self) -> None:
        """Wait for the thread that finishes the last checkpoint."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _start_write(self, run: TrainingRun) -> None:
        """Write this process's files to the page cache and finish them in a thread."""
        self._settle()
        # Before the file exists: a checkpoint of NaN would be resumed again and again.
        refuse_broken_weights(run.parallel, run.step)
        start = self._clock()
        self._unsettled, self._failed, self._pending = self._channel.size > 1, False, None
        local = local_tensors(run)
        try:
            self._pending = self._store.write(run.step, tensors_to_store(local), plain_values(run), row_ranges(local))
        except UserError as error:
            self._fail(error)
        self._record_cost(self._clock() - start)
        if self._pending is not None:
            self._thread = threading.Thread(target=self._finish, args=(self._pending,), name="checkpoint")
            self._thread.start()

    def _finish(self, pending: PendingCheckpoint) -> None:
        """Run in the thread; the time for checksums counts, since it takes a core from training."""
        start = time.thread_time()
        try:
            if self._channel.size == 1:
                pending.finish()
            else:
                pending.finish_rank()
        except UserError as error:
            self._fail(error)
        self._record_cost(self._spent + time.thread_time() - start)

    def _settle(self) -> None:
        """Wait until all have finished; the first process of each disk then publishes the checkpoint or drops it.

        Older ones are removed once every disk has the new one.
        """
        self.wait()
        if not self._unsettled:
            return
        failed = self._channel.failed_ranks(self._failed)
        pending, self._pending, self._unsettled = self._pending, None, False
        leads = self._store.disk.is_led_here
        if leads and pending is not None and not failed:
            try:
                pending.publish()
            except UserError as error:
                self._fail(error)
        elif leads and pending is not None:
            pending.drop()
            if failed != [0]:
                rank = next(rank for rank in failed if rank)
                self._fail(f"process {rank} of {self._channel.size} could not write its files; see its log")
        if not self._channel.failed_ranks(self._failed) and leads:
            self._store.remove_old()

    def _fail(self, error: UserError | str) -> None:
        """Report a checkpoint that failed; the run continues."""
        self._failed = True
        step = self._store.last_step()
        kept = "there is none yet" if step is None else f"that of optimizer step {step} is kept"
        self._notify(f"warning: no checkpoint was made, {kept}: {error}")

    def _record_cost(self, seconds: float) -> None:
        """Record what the last checkpoint cost, and when the next one is due."""
        self._spent = seconds
        self._due = self._clock() + max(self._seconds or 0.0, seconds / MOST_TIME_SHARE)
