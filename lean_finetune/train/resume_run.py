"""Everything that decides a run's result, and the unfinished run that it continues."""

import hashlib
import json
import platform
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from lean_finetune.config.declared_params import tracked_values
from lean_finetune.config.field_types import Resume
from lean_finetune.config.schema import Params, Run
from lean_finetune.core.atomic_files import read_sealed, sha256_file, sha256_json
from lean_finetune.core.errors import UserError
from lean_finetune.distributed.processes import ControlChannel
from lean_finetune.model.kernels.triton_kernels import has_triton_kernels
from lean_finetune.model.precision import precision_of
from lean_finetune.pinning.code import code_hashes
from lean_finetune.pinning.locate import locked_files
from lean_finetune.pinning.read_locks import read_model_lock, read_tokenizer_lock
from lean_finetune.plan.batch_plan import Plan, plan_settings_hash, read_plan
from lean_finetune.train.checkpoint.checkpoint_files import CheckpointStore, steps_in
from lean_finetune.train.checkpoint.checkpointer import Checkpointer, DiskSpace
from lean_finetune.train.checkpoint.scratch_dir import (
    FINISHED,
    RECORD,
    RunDirectory,
    find_disk,
    lock_earlier_run,
    lock_run_directory,
    read_values,
)
from lean_finetune.train.checkpoint.training_state import layout_of
from lean_finetune.train.make_job import Paths, dotted
from lean_finetune.train.process.stop_signals import Stopped, StopRequest

# Fingerprint of a run: everything that decides its result, by kind.
#
# A checkpoint is resumed only if the fingerprints match. The processes of a distributed run compare theirs before they
# train, since each node reads its own files.

TRAINING = "lean_finetune.train.train_run"
"""The module whose imports are the code of a run."""
LIBRARIES = ("bitsandbytes", "numpy", "peft", "safetensors", "torch", "transformers")
KEY_DIGITS = 32
WHERE_STORED = ("sharding", "shard_group_gpus", "context_parallel", "pipeline_stages", "offload_to")
"""Parameters of `train` that decide where weights and state are stored."""
MISSING = "missing"
MOST_DIFFERENCES, MOST_DIGITS = 5, 12
"""In a message: names that differ between processes, and digits of a hash."""

Fingerprint = Mapping[str, Mapping[str, Any]]
"""Kind (parameters, data, model, code, device, threads, versions, sharing) → name → value or hash."""
NOT_RESUMED = {"sharing"}
"""Kinds that may change when a run is resumed: they change the result by rounding only, or not at all."""
PER_PROCESS = {"device", "threads"}
"""Kinds that may differ between the processes of a run."""


def run_fingerprint(params: Params, paths: Paths, device: torch.device, threads: int) -> Fingerprint:
    """Return everything that decides the result of a run, by kind and name.

    The names of input files count, but not their location: a temporary copy reads elsewhere. `threads` is the number of
    CPU threads of all processes on this machine.
    """
    values = tracked_values(params)
    cuda = device.type == "cuda"
    own = ("triton",) if has_triton_kernels(device) else ()
    packages = {"none": (), "auto": own, "liger": ("liger-kernel",), "fla": ("fla-core", "triton")}
    kernels = packages[params.train.fused_kernels]
    parameters = {
        "seed": values["seed"],
        "train": {name: value for name, value in values["train"].items() if name not in WHERE_STORED},
        "bucket": plan_settings_hash(paths.plan),
        "precision": precision_of(params, paths.precision),
    }
    sharing = {f"train.{name}": values["train"][name] for name in WHERE_STORED if name in values["train"]}
    if params.train.pipeline_stages > 1:
        sharing["stage_layers"] = read_sealed(paths.verdict).get("stage_layers")
    return {
        "parameters": dotted(parameters),
        "data": {
            **{f"tokens.{name}": digest for name, digest in _directory_hashes(paths.tokens).items()},
            "rows of each step": trained_rows_hash(read_plan(paths.plan)),
            **{f"reference.{name}": digest for name, digest in _directory_hashes(paths.reference).items()},
        },
        "model": {
            "model": _pinned_files(paths.model_lock, read_model_lock),
            "tokenizer": _pinned_files(paths.tokenizer_lock, read_tokenizer_lock),
        },
        "code": code_hashes(TRAINING),
        "device": {"name": torch.cuda.get_device_name(device) if cuda else torch.backends.cpu.get_cpu_capability()},
        "threads": {"run.cpu_threads": threads},
        "versions": {"python": platform.python_version(), **{name: version(name) for name in (*LIBRARIES, *kernels)}},
        "sharing": {"hardware.num_gpus": params.hardware.num_gpus, **sharing, "plan": sha256_file(paths.plan)},
    }


def resumable_part(fingerprint: Fingerprint) -> Fingerprint:
    """Return the kinds that must match for a checkpoint to be resumed."""
    return {kind: names for kind, names in fingerprint.items() if kind not in NOT_RESUMED}


def run_key(record: Mapping[str, Any]) -> str:
    """Return the name of a run's directory: a hash of its fingerprint without `sharing`, and of the runs it resumed."""
    return sha256_json(record)[:KEY_DIGITS]


def differences(here: Fingerprint, there: Fingerprint) -> dict[str, list[str]]:
    """Return the names that differ by kind; kinds without differences are left out."""
    nothing: Mapping[str, Any] = {}
    found = {}
    for kind in {**here, **there}:
        ours, theirs = here.get(kind, nothing), there.get(kind, nothing)
        found[kind] = [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]
    return {kind: names for kind, names in found.items() if names}


def refuse_different_runs(fingerprint: Fingerprint, channel: ControlChannel) -> None:
    """Compare the fingerprints of all processes, all of which call this.

    Raises:
        UserError: in every process, naming what differs, and the value of each process and machine.
    """
    compared = {
        name: str(value)[:MOST_DIGITS] if kind in ("data", "model", "code") or name == "plan" else json.dumps(value)
        for kind, names in fingerprint.items()
        if kind not in PER_PROCESS
        for name, value in names.items()
    }
    digest = hashlib.sha256(json.dumps(compared, sort_keys=True).encode()).digest()
    if len({number for (number,) in channel.gather_after_work(int.from_bytes(digest[:7], "big"))}) == 1:
        return
    by_rank = [json.loads(text) for text in channel.gather_text(json.dumps([platform.node(), compared]))]
    names = dict.fromkeys(name for _, theirs in by_rank for name in theirs)
    different = [name for name in names if len({theirs.get(name, MISSING) for _, theirs in by_rank}) > 1]
    first, *others = different
    ranks_by_value: dict[str, list[str]] = defaultdict(list)
    for rank, (host, theirs) in enumerate(by_rank):
        ranks_by_value[theirs.get(first, MISSING)].append(f"{rank} on {host}")
    got = "; ".join(f"{value} in process {', '.join(ranks)}" for value, ranks in ranks_by_value.items())
    shown = ", ".join(others[:MOST_DIFFERENCES]) + (", …" if len(others) > MOST_DIFFERENCES else "")
    more = f"; {len(others)} more differ ({shown})"
    raise UserError(
        f"{first}: must be the same in all processes of a run; got {got}{more if others else ''}; copy params.yaml, "
        "locks/, data/ and the code from one machine to the others, or use a shared disk"
    )


def trained_rows_hash(plan: Plan) -> str:
    """Hash the rows of every step, regardless of how they are split into micro-batches and distributed to GPUs."""
    digest = hashlib.sha256()
    for start, end in pairwise(plan.bounds[plan.step_bounds].tolist()):
        digest.update(np.sort(plan.rows[start:end]).tobytes() + b"|")
    epochs = plan.epoch[plan.step_bounds[:-1]]
    return hashlib.sha256(digest.digest() + epochs.tobytes()).hexdigest()


def _directory_hashes(directory: Path) -> dict[str, str]:
    """Hash every file below a directory."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {file.relative_to(directory).as_posix(): sha256_file(file) for file in files}


def _pinned_files(lock: Path, read: Callable[[Path], dict[str, Any]]) -> str:
    """Hash the file hashes in a lock, those of an adapter too; where the files are may differ between machines."""
    return sha256_json(locked_files(read(lock))) if lock.is_file() else MISSING


# Choose the unfinished run to resume, report why the nearest one is not resumed, and open the run's checkpoints.
#
# Each run has a directory below scratch/train. Its record (`RECORD`) has its fingerprint, and the runs with other code
# or library versions that it resumed. A hash of both, without how GPUs share the run, names the directory. A run that
# mixes code or versions has its own directory, so that an exact run never resumes it.

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
    """Yield interrupted runs that have a checkpoint and a record, which the directory's name is a hash of."""
    for path in root.glob(f"*/{RECORD}"):
        directory, steps = path.parent, steps_in(path.parent)
        if not steps or (directory / FINISHED).exists():
            continue
        with suppress(OSError, ValueError):  # Of a damaged one nothing is known.
            record = read_values(path)
            if run_key({name: record.get(name) for name in ("parts", "earlier")}) == directory.name:
                yield UnfinishedRun(directory, record, steps[-1])


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
