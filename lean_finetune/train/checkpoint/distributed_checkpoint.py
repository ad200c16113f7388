"""Checkpoints of a run on several GPUs: made, published and stopped at by all of its processes at the same step.

After each step every process says a few whole numbers: whether it was asked to stop, whether it still finishes its
part of the last checkpoint. The first process's clock says when one is due. A checkpoint gets its name once every part
is on the disk. Where one process fails alone nothing can be agreed on any more: what was kept before serves.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from lean_finetune.config.schema import Run
from lean_finetune.core.errors import UserError
from lean_finetune.distributed.control_messages import ControlChannel
from lean_finetune.step.batches import Batch
from lean_finetune.train.checkpoint.checkpoint_files import CheckpointStore, Unfinished
from lean_finetune.train.checkpoint.disk_space import Room
from lean_finetune.train.checkpoint.resume import Checkpoints, opened
from lean_finetune.train.checkpoint.scratch_dir import Choice, held_alone, held_by_us
from lean_finetune.train.checkpoint.training_state import Running, cut_of
from lean_finetune.train.monitor.finite_checks import refuse_broken_weights
from lean_finetune.train.process.stop_signals import Stop, Stopped


class SharedCheckpoints(Checkpoints):
    """Checkpoints whose every decision is that of all processes."""

    _pending: Unfinished | None = None
    """Written by all, and not yet published."""
    _begun = False
    """Whether a checkpoint was begun that is not yet settled; alike in all processes."""
    _failed = False
    """Whether this process could not write its part of it."""

    @property
    def _channel(self) -> ControlChannel:
        return self._store.channel

    def between(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """All of them: the others would wait for what this process leaves out."""
        return batches

    def step_done(self, run: Running) -> None:
        """See Checkpoints."""
        busy = self._finishing is not None and self._finishing.is_alive()
        said = self._channel.gather(int(busy), int(self.is_due()))
        if not any(is_busy for is_busy, _ in said):
            self._settle()
            if said[0][1]:
                self._begin(run)
        self.check_stop()

    def check_stop(self) -> None:
        """Stop if any process was asked to."""
        numbers = [number for (number,) in self._channel.gather(self._stop.number or 0) if number]
        if numbers:
            raise Stopped(numbers[0])

    def keep_after_fault(self, run: Running) -> None:
        """Nothing: the others may be within a step."""

    def _keep_last(self, run: Running) -> None:
        """Make a checkpoint of what is done, and publish it."""
        self._settle()
        if run.step and not self._channel.from_first(int(self._store.holds(run.step)))[0]:
            self._begin(run)
            self._settle()

    def _begin(self, run: Running) -> None:
        """Hand a part each to the system; a thread does the rest."""
        self._settle()
        refuse_broken_weights(run.parallel, run.step)
        start = self._clock()
        self._begun, self._failed = True, False
        try:
            self._pending = self._write(run)
        except UserError as error:
            self._fail(error)
        self._spend(self._clock() - start)
        if self._pending is not None:
            self._finish_in_thread(self._pending)

    def _finish(self, unfinished: Unfinished) -> None:
        """In the thread: this process's part."""
        start = time.thread_time()
        try:
            unfinished.finish_part()
        except UserError as error:
            self._fail(error)
        self._spend(self._spent + time.thread_time() - start)

    def _fail(self, error: UserError) -> None:
        """This process cannot do its part."""
        self._failed = True
        self._warn(error)

    def _settle(self) -> None:
        """Wait for this process's part, hear of the others', and have the first publish the whole or drop it."""
        if not self._begun:
            return
        self.wait()
        failed = [rank for rank, (bad,) in enumerate(self._channel.gather_after_work(int(self._failed))) if bad]
        pending, self._pending, self._begun = self._pending, None, False
        if not self._channel.is_first or pending is None:
            return
        if not failed:
            try:
                pending.publish()
            except UserError as error:
                self._warn(error)
            return
        pending.drop()
        if failed != [0]:
            others = [rank for rank in failed if rank]
            self._told(
                f"warning: no checkpoint was made, what was there stays: process {others[0]} of "
                f"{self._channel.size} could not write its part, and says why in its log"
            )


def opened_by_all(
    choice: Choice,
    *,
    run: Run,
    stop: Stop,
    told: Callable[[str], None],
    channel: ControlChannel,
    sharding: str,
    room: Room | None = None,
) -> AbstractContextManager[Checkpoints]:
    """As `resume.opened`, for a run of one process or of several, all of which call this.

    Raises:
        UserError: another run works there, or the disk refused.
        Stopped: that was asked for; the user was told.
    """
    if channel.size == 1:
        return opened(choice, run=run, stop=stop, told=told, room=room)
    return _opened_together(choice, run, stop, told, channel, sharding, room)


@contextmanager
def _opened_together(
    choice: Choice,
    run: Run,
    stop: Stop,
    told: Callable[[str], None],
    channel: ControlChannel,
    sharding: str,
    room: Room | None,
) -> Iterator[Checkpoints]:
    """Of several processes the first holds the directories."""
    with ExitStack() as stack:
        if channel.is_first:
            stack.enter_context(held_alone(choice.directory, told, choice.record))
            stack.enter_context(held_by_us(choice.earlier))
        channel.gather_after_work(0)  # From here on the first process holds the directory.
        store = CheckpointStore(choice.directory, run.keep_checkpoints, told, channel)
        checkpoints = SharedCheckpoints(
            store,
            seconds=run.checkpoint_seconds,
            stop=stop,
            told=told,
            cut=cut_of(channel.size, sharding),
            earlier=choice.earlier,
            room=room,
        )
        with checkpoints.told_of_stop():
            yield checkpoints
