"""Choose the unfinished run to resume, report why the nearest one is not resumed, and open the run's checkpoints.

Each run has a directory below scratch/train. Its record (`RECORD`) has its fingerprint, and the runs with other code or
library versions that it resumed. A hash of both, without how GPUs share the run, names the directory. A run that mixes
code or versions has its own directory, so that an exact run never resumes it.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from lean_finetune.config.field_types import Resume
from lean_finetune.config.schema import Run
from lean_finetune.distributed.processes import ControlChannel
from lean_finetune.train.checkpoint.checkpoint_files import CheckpointStore, steps_in
from lean_finetune.train.checkpoint.checkpointer import Checkpointer, DiskSpace
from lean_finetune.train.checkpoint.scratch_dir import (
    FINISHED,
    RECORD,
    RunDirectory,
    find_disk,
    lock_earlier_run,
    lock_run_directory,
)
from lean_finetune.train.checkpoint.training_state import layout_of
from lean_finetune.train.process.stop_signals import Stopped, StopRequest
from lean_finetune.train.run_fingerprint import Fingerprint, differences, resumable_part, run_key

COMPATIBLE = {"code", "versions"}
"""Kinds of the fingerprint that `run.resume: compatible` ignores."""
MOST_NAMES = 3
"""Names shown of each kind that differs."""


class UnfinishedRun(NamedTuple):
    """A run that was interrupted, its record, and the finished optimizer steps in its newest checkpoint."""

    directory: Path
    record: Mapping[str, Any]
    step: int


def resumed_figures(chosen: RunDirectory) -> dict[str, str]:
    """Return the metric of a run that resumed one with other code or versions."""
    earlier = chosen.record["earlier"] if chosen.record else ()
    texts = [f"compatible: with other {_kinds(one['differs'])} up to step {one['step']}" for one in earlier]
    return {"resumed": "; ".join(texts)} if texts else {}


def choose_directory(
    root: Path, fingerprint: Fingerprint, resume: Resume, notify: Callable[[str], None]
) -> RunDirectory:
    """Find the unfinished run to resume below `root`; report why the nearest one is not resumed."""
    part = resumable_part(fingerprint)

    def run_directory(resumed: Sequence[Mapping[str, Any]], earlier: Path | None = None) -> RunDirectory:
        """The directory of this run if it has resumed these runs."""
        decides = {"parts": part, "earlier": resumed}
        record = {**decides, "sharing": fingerprint["sharing"]}
        return RunDirectory(directory=root / run_key(decides), earlier=earlier, record=record)

    own = run_directory([])
    others = [] if steps_in(own.directory) else list(_unfinished(root))
    if not others:
        return own

    def distance(other: UnfinishedRun) -> tuple[int, int, int, int]:
        """Order by incompatible kinds, different kinds, different names, then finished steps (more is nearer)."""
        found = differences(part, other.record["parts"])
        return len(found.keys() - COMPATIBLE), len(found), sum(map(len, found.values())), -other.step

    nearest = min(others, key=distance)
    different = differences(part, nearest.record["parts"])
    which = f"the unfinished training in {nearest.directory} (optimizer step {nearest.step})"
    if resume == "compatible" and not different:
        return replace(run_directory(nearest.record["earlier"]), directory=nearest.directory)
    if resume == "compatible" and different.keys() <= COMPATIBLE:
        notify(f"note: {which} is resumed although it had other {_kinds(different)}: run.resume is compatible")
        step = {"run": nearest.directory.name, "step": nearest.step, "differs": different}
        return run_directory([*nearest.record["earlier"], step], nearest.directory)
    hint = "; -S run.resume=compatible resumes it" if different.keys() <= COMPATIBLE else ""
    why = _changes(different, part, nearest.record["parts"]) or "it has itself resumed other code or versions"
    notify(f"note: {which} is not resumed: {why}{hint}")
    return own


def choose_for_all_ranks(
    root: Path, fingerprint: Fingerprint, resume: Resume, notify: Callable[[str], None], channel: ControlChannel
) -> RunDirectory:
    """Let the first process run `choose_directory`, and return its choice in all processes."""
    chosen = choose_directory(root, fingerprint, resume, notify) if channel.is_first else None
    channel.gather_after_work(0)
    names = [] if chosen is None else [path.name for path in (chosen.directory, chosen.earlier) if path is not None]
    directory, *earlier = (root / name for name in json.loads(channel.gather_text(json.dumps(names))[0]))
    return chosen or RunDirectory(directory=directory, earlier=earlier[0] if earlier else None)


def _unfinished(root: Path) -> Iterator[UnfinishedRun]:
    """Yield interrupted runs that have a checkpoint and a record."""
    for path in root.glob(f"*/{RECORD}"):
        directory, steps = path.parent, steps_in(path.parent)
        if steps and not (directory / FINISHED).exists():
            yield UnfinishedRun(directory, json.loads(path.read_text(encoding="utf-8")), steps[-1])


def _kinds(different: Mapping[str, Sequence[str]]) -> str:
    """List kinds with the first names of each."""
    return ", ".join(f"{kind} ({_first_names(names)})" for kind, names in different.items())


def _changes(different: Mapping[str, Sequence[str]], here: Fingerprint, there: Fingerprint) -> str:
    """List what differs, with both values unless they are hashes."""

    def text(kind: str, name: str) -> str:
        if kind in ("data", "model", "code") or name == "bucket":
            return name
        before, now = (json.dumps(one.get(kind, {}).get(name)) for one in (there, here))
        return f"{name}: {before} there, {now} here"

    return ", ".join(
        f"{kind} differ ({_first_names([text(kind, name) for name in names])})" for kind, names in different.items()
    )


def _first_names(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


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

    All processes of a run call this; the first one of each disk locks.

    Raises:
        UserError: another run works there, or the disk refused.
        Stopped: a signal came; the user was notified.
    """
    channel = channel or ControlChannel()
    with ExitStack() as stack:
        starts_over = False
        if channel.is_first:
            starts_over = stack.enter_context(lock_run_directory(where.directory, notify, where.record))
            stack.enter_context(lock_earlier_run(where.earlier))
        channel.gather_after_work(0)  # From here on the first process has the lock.
        disk = find_disk(where.directory, channel)
        if not disk.is_shared:
            record, starts_over = json.loads(channel.gather_text(json.dumps([where.record, starts_over]))[0])
            if disk.is_led_here and not channel.is_first:
                lock = lock_run_directory(where.directory, notify, record, starts_over=starts_over)
                stack.enter_context(lock)
                stack.enter_context(lock_earlier_run(where.earlier))
            channel.gather_after_work(0)
        checkpoints = Checkpointer(
            CheckpointStore(where.directory, run.keep_checkpoints, notify, channel, disk),
            seconds=run.checkpoint_seconds,
            stop=stop,
            notify=notify,
            layout=layout_of(channel.size, sharding),
            earlier=where.earlier,
            disk_space=disk_space,
        )
        try:
            yield checkpoints
        except Stopped as reason:
            notify(f"train: stopped by {reason.name}; {checkpoints.resume_hint()}")
            raise
        finally:
            checkpoints.wait()
