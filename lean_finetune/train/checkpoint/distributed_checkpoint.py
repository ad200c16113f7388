"""Checkpoints of a run on several GPUs, which all processes write, publish and stop at after the same step.

After each step the processes exchange whether they were asked to stop and whether they still finish the last
checkpoint. The first process's clock decides when one is due. A checkpoint gets its name once the files of all
processes are on the disk. If one process fails alone, earlier checkpoints remain.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from lean_finetune.config.schema import Run
from lean_finetune.core.errors import UserError
from lean_finetune.distributed.control_messages import ControlChannel
from lean_finetune.step.batches import Batch
from lean_finetune.train.checkpoint.checkpoint_files import CheckpointStore, PendingCheckpoint
from lean_finetune.train.checkpoint.disk_space import DiskSpace
from lean_finetune.train.checkpoint.resume import Checkpointer
from lean_finetune.train.checkpoint.scratch_dir import RunDirectory, lock_earlier_run, lock_run_directory
from lean_finetune.train.checkpoint.training_state import TrainingRun, layout_of
from lean_finetune.train.monitor.finite_checks import refuse_broken_weights
from lean_finetune.train.process.stop_signals import Stopped, StopRequest


class DistributedCheckpointer(Checkpointer):
    """A checkpointer whose processes take every decision together."""

    _pending: PendingCheckpoint | None = None
    """Written by all processes, not published yet."""
    _started = False
    """Whether a checkpoint was started and not settled; equal in all processes."""
    _failed = False
    """Whether this process could not write its files of it."""

    @property
    def _channel(self) -> ControlChannel:
        return self._store.channel

    def between(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Return all batches: the other processes wait for each of them."""
        return batches

    def after_step(self, run: TrainingRun) -> bool:
        """See `Checkpointer`."""
        status = self._channel.gather(int(self._is_busy()), int(self.is_due()))
        starts = False
        if not any(busy for busy, _ in status):
            self._settle()
            starts = bool(status[0][1])
            if starts:
                self._start_write(run)
        self.check_stop()
        return starts

    def check_stop(self) -> None:
        """Stop if any process was asked to."""
        numbers = [number for (number,) in self._channel.gather(self._stop.signal_number or 0) if number]
        if numbers:
            raise Stopped(numbers[0])

    def save_after_fault(self, run: TrainingRun) -> None:
        """Write nothing: the other processes may be inside a step."""

    def _save_last(self, run: TrainingRun) -> None:
        """Write a checkpoint and publish it."""
        self._settle()
        if run.step and not self._channel.from_first(int(self._store.has_step(run.step)))[0]:
            self._start_write(run)
            self._settle()

    def _start_write(self, run: TrainingRun) -> None:
        """Write this process's files to the page cache and finish them in a thread."""
        self._settle()
        refuse_broken_weights(run.parallel, run.step)
        start = self._clock()
        self._started, self._failed = True, False
        try:
            self._pending = self._write(run)
        except UserError as error:
            self._fail(error)
        self._record_cost(self._clock() - start)
        if self._pending is not None:
            self._finish_in_thread(self._pending)

    def _finish(self, pending: PendingCheckpoint) -> None:
        """Run in the thread: finish this process's files."""
        start = time.thread_time()
        try:
            pending.finish_rank()
        except UserError as error:
            self._fail(error)
        self._record_cost(self._spent + time.thread_time() - start)

    def _fail(self, error: UserError) -> None:
        self._failed = True
        self._warn(error)

    def _settle(self) -> None:
        """Wait until all processes have finished; the first one then publishes the checkpoint or drops it."""
        if not self._started:
            return
        self.wait()
        failed = [rank for rank, (bad,) in enumerate(self._channel.gather_after_work(int(self._failed))) if bad]
        pending, self._pending, self._started = self._pending, None, False
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
            rank = next(rank for rank in failed if rank)
            self._warn(f"process {rank} of {self._channel.size} could not write its files; see its log")


@contextmanager
def open_checkpointer(
    where: RunDirectory,
    *,
    run: Run,
    stop: StopRequest,
    notify: Callable[[str], None],
    channel: ControlChannel | None = None,
    sharding: str = "none",
    disk_space: DiskSpace | None = None,
) -> Iterator[Checkpointer]:
    """Lock a run's directory and yield its checkpointer; the directory is cleared if the block succeeds.

    All processes of a run call this; the first one locks.

    Args:
        where: the directory, and that of another run to resume from.
        run: how often checkpoints are made and how many are kept.
        stop: set by signals.
        notify: gets lines for the user.
        channel: connects the processes; None = one process.
        sharding: how weights are sharded.
        disk_space: see `Checkpointer`.

    Raises:
        UserError: another run works there, or the disk refused.
        Stopped: a signal came; the user was notified.
    """
    channel = channel or ControlChannel()
    with ExitStack() as stack:
        if channel.is_first:
            stack.enter_context(lock_run_directory(where.directory, notify, where.record))
            stack.enter_context(lock_earlier_run(where.earlier))
        channel.gather_after_work(0)  # From here on the first process has the lock.
        kind = Checkpointer if channel.size == 1 else DistributedCheckpointer
        checkpoints = kind(
            CheckpointStore(where.directory, run.keep_checkpoints, notify, channel),
            seconds=run.checkpoint_seconds,
            stop=stop,
            notify=notify,
            layout=layout_of(channel.size, sharding),
            earlier=where.earlier,
            disk_space=disk_space,
        )
        with checkpoints.report_stop():
            yield checkpoints
