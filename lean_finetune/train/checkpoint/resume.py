"""Checkpoints while training runs: where they are, when one is made, and how a run goes on from one.

A checkpoint is made in two parts. The loop waits while the system takes the bytes (a copy within memory); checksums,
the disk and the name follow in a thread. How often depends on the clock and on what a checkpoint costs, and so on
nothing that a result depends on.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lean_finetune.config.schema import Run
from lean_finetune.core.errors import UserError
from lean_finetune.step.batches import Batch
from lean_finetune.train.checkpoint.checkpoint_files import CheckpointStore, Unfinished, steps_in
from lean_finetune.train.checkpoint.disk_space import Room, trained_bytes
from lean_finetune.train.checkpoint.loop_hooks import Keeper
from lean_finetune.train.checkpoint.scratch_dir import Choice, held_alone, held_by_us
from lean_finetune.train.checkpoint.training_state import (
    Running,
    cut_of,
    held_by,
    pieces_of,
    put_back,
    tensors_of,
    values_of,
)
from lean_finetune.train.monitor.finite_checks import Diverged, refuse_broken_weights
from lean_finetune.train.oom.oom_state import OutOfMemory
from lean_finetune.train.process.stop_signals import Stop, Stopped

ALONE_CUT = cut_of(1, "none")
LARGEST_SHARE = 0.02
"""Of the time, that checkpoints may take: after a dear one, the next comes later."""


class Checkpoints(Keeper):
    """Keeps the checkpoints of one run. Made by `opened`, used by the loop."""

    def __init__(
        self,
        store: CheckpointStore,
        *,
        seconds: float | None,
        stop: Stop,
        told: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        cut: Mapping[str, Any] = ALONE_CUT,
        earlier: Path | None = None,
        room: Room | None = None,
    ):
        """Look for what an earlier process left.

        Args:
            store: their files.
            seconds: between two; None = only when asked to stop.
            stop: who asks.
            told: gets a line where one is gone on from, is damaged or cannot be written.
            clock: seconds that never jump.
            cut: how the run is shared.
            earlier: the directory of another run, from which this one goes on where it has no checkpoint of its own.
            room: what else the run will write, for which there must be room on the disk; None = nothing.
        """
        self._store, self._seconds, self._told, self._clock = store, seconds, told, clock
        self._stop, self._earlier, self._room = stop, earlier, room
        self._found = store.newest()
        if self._found is None and earlier is not None:
            self._found = CheckpointStore(earlier, store.keep, told, store.channel).newest()
        self.first_step = 0 if self._found is None else self._found.values["step"]
        self.measures_load = self._found is None or self._found.values["cut"] != cut
        self._finishing: threading.Thread | None = None
        self._spent = 0.0
        """Seconds that the last checkpoint took from training, or from a core that training may use."""
        self._due = clock() + (seconds or 0.0)

    def resume(self, run: Running, steps: int) -> None:
        """Put back the checkpoint that was found, and say so; look for room on the disk."""
        if self._found is not None:
            self._put_back(run, steps)
        if self._room is None:
            return
        channel = self._store.channel
        sizes = channel.gather_after_work(sum(tensor.nbytes for tensor in tensors_of(held_by(run)).values()))
        if channel.is_first:
            self._room.check(
                self._store.directory,
                trained_bytes=trained_bytes(run),
                checkpoint_bytes=sum(size for (size,) in sizes),
                there=len(steps_in(self._store.directory)),
                most=1 if self._seconds is None else self._store.keep + 1,
            )

    def _put_back(self, run: Running, steps: int) -> None:
        """Go on from the checkpoint that was found."""
        assert self._found is not None
        found, self._found = self._found, None
        try:
            put_back(run, found.tensors(), [found.values_of(part) for part in range(found.parts)])
        except (RuntimeError, LookupError, TypeError) as error:
            if self._earlier is None:
                raise
            raise UserError(
                f"run.resume: compatible must meet a checkpoint that this code can read; the one in {found.path} is "
                f"another ({error}); set run.resume=exact to begin at the first step"
            ) from error
        self._told(f"train: resumed at optimizer step {run.step} of {steps} (checkpoint of {found.values['saved_at']})")
        if self.measures_load:
            cut = found.values["cut"]
            self._told(
                f"note: that checkpoint is of {cut['gpus']} GPU(s), train.sharding={cut['sharding']}: the steps before "
                "it are those of this run but for rounding, and peaks of memory are measured from here on"
            )

    def between(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Stops between two batches where that was asked for."""
        return self._stop.between(batches)

    @contextmanager
    def keeping(self, run: Running) -> Iterator[None]:
        """Inside, a signal waits for the end of a step or batch; a last checkpoint is then made.

        Raises:
            Stopped: a signal came.
            UserError: a loss, gradient or weight was not finite, or memory ended; with what is kept.
        """
        try:
            with self._stop.waiting():
                yield
            self.check_stop()
        except Stopped:
            self._keep_last(run)
            raise
        except Diverged as error:
            raise UserError(f"{error}; {self._kept_of_diverged()}") from None
        except OutOfMemory as error:
            if error.weights_whole:  # Then the run is where its last step left it, random states too.
                self.keep_after_fault(run)
            raise UserError(str(error), *error.details, self.kept()) from None

    def check_stop(self) -> None:
        """Stop here if that was asked for.

        Raises:
            Stopped: it was.
        """
        self._stop.check()

    def keep_after_fault(self, run: Running) -> None:
        """Make a checkpoint of the steps before a fault."""
        self._keep_last(run)

    def step_done(self, run: Running) -> None:
        """Makes a checkpoint where one is due.

        Raises:
            Stopped: that was asked for.
            Diverged: weights are not finite where a checkpoint would be made.
        """
        self._stop.check()
        if self.is_due():
            self._begin(run)

    def all_done(self, run: Running) -> None:
        """Keep the end of training, alone: what is left is to publish, and a kill or a full disk costs no step."""
        self._keep_last(run)
        self.wait()
        if self._store.channel.is_first and self._store.holds(run.step):
            self._store.drop_old(keep=1)

    def is_due(self) -> bool:
        """Whether it is time for a checkpoint, and the last one is finished."""
        busy = self._finishing is not None and self._finishing.is_alive()
        return self._seconds is not None and not busy and self._clock() >= self._due

    def _keep_last(self, run: Running) -> None:
        """Make a checkpoint of what is done before the process ends."""
        self.wait()
        if run.step and not self._store.holds(run.step):
            self._begin(run)

    def _last_kept(self) -> int | None:
        """Steps in the newest checkpoint, all of which are finished now."""
        self.wait()
        return self._store.last_step()

    def kept(self) -> str:
        """What there is to go on from, for people."""
        step = self._last_kept()
        if step is None and self._earlier is not None:
            return f"the checkpoint in {self._earlier} is kept: the same command goes on from there"
        if step is None:
            return "no checkpoint was made: the same command starts at the first step"
        return f"the checkpoint of optimizer step {step} is kept: the same command goes on from there"

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """Inside, outputs are written; where that fails, the user is told what is kept.

        Raises:
            UserError: the disk refused.
        """
        try:
            yield
        except UserError as error:
            raise UserError(f"{error}; {self.kept()}", *error.details) from None

    def _kept_of_diverged(self) -> str:
        """What is left after weights went wrong, for people."""
        step = self._last_kept()
        if step is None:
            return "no checkpoint was made yet"
        return (
            f"the checkpoint of optimizer step {step} is kept in {self._store.directory}: the same command goes on "
            "from there and ends here again, a changed one starts at the first step"
        )

    @contextmanager
    def told_of_stop(self) -> Iterator[None]:
        """Inside, the run is stopped with a word to the user; nothing is left half-written.

        Raises:
            Stopped: that was asked for.
        """
        try:
            yield
        except Stopped as reason:
            self._told(f"train: stopped by {reason.name}; {self.kept()}")
            raise
        finally:
            self.wait()

    def wait(self) -> None:
        """Wait for the thread that finishes the last checkpoint."""
        if self._finishing is not None:
            self._finishing.join()
            self._finishing = None

    def _begin(self, run: Running) -> None:
        """Hand a checkpoint to the system; a thread does the rest."""
        self.wait()
        refuse_broken_weights(run.parallel, run.step)
        start = self._clock()
        try:
            unfinished = self._write(run)
        except UserError as error:
            self._warn(error)
            unfinished = None
        self._spend(self._clock() - start)
        if unfinished is not None:
            self._finish_in_thread(unfinished)

    def _write(self, run: Running) -> Unfinished:
        """Hand the bytes to the system."""
        held = held_by(run)
        return self._store.write(run.step, tensors_of(held), values_of(run), pieces_of(held))

    def _finish_in_thread(self, unfinished: Unfinished) -> None:
        """Do what is left while training goes on."""
        self._finishing = threading.Thread(target=self._finish, args=(unfinished,), name="checkpoint")
        self._finishing.start()

    def _finish(self, unfinished: Unfinished) -> None:
        """In the thread; its work on checksums takes a core from training."""
        start = time.thread_time()
        try:
            unfinished.finish()
        except UserError as error:
            self._warn(error)
        self._spend(self._spent + time.thread_time() - start)

    def _warn(self, error: UserError) -> None:
        """A checkpoint that failed is no reason to end the run."""
        self._told(f"warning: no checkpoint was made, what was there stays: {error}")

    def _spend(self, seconds: float) -> None:
        """Take note of what the last checkpoint cost, and when the next is due."""
        self._spent = seconds
        self._due = self._clock() + max(self._seconds or 0.0, seconds / LARGEST_SHARE)


@contextmanager
def opened(
    choice: Choice, *, run: Run, stop: Stop, told: Callable[[str], None], room: Room | None = None
) -> Iterator[Checkpoints]:
    """The checkpoints of the training that has this directory, removed with it when the block ends well.

    Args:
        choice: the directory, and that of another run to resume.
        run: how often they are made and how many are kept.
        stop: who asks to stop.
        told: gets lines for the user.
        room: see `Checkpoints`.

    Raises:
        UserError: another process works there, or the disk refused.
        Stopped: that was asked for; the user was told.
    """
    with held_alone(choice.directory, told, choice.record), held_by_us(choice.earlier):
        store = CheckpointStore(choice.directory, run.keep_checkpoints, told)
        checkpoints = Checkpoints(
            store, seconds=run.checkpoint_seconds, stop=stop, told=told, earlier=choice.earlier, room=room
        )
        with checkpoints.told_of_stop():
            yield checkpoints
