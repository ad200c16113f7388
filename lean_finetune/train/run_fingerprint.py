"""Fingerprint of a run: everything that decides its result, by kind.

A checkpoint is resumed only if the fingerprints match. The processes of a distributed run compare theirs before they
train, since each node reads its own files.
"""

import hashlib
import json
import platform
from collections import defaultdict
from collections.abc import Mapping
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lean_finetune.config.declared_params import tracked_values
from lean_finetune.config.schema import Params
from lean_finetune.core.atomic_files import read_json, sha256_file, sha256_json
from lean_finetune.core.errors import UserError
from lean_finetune.distributed.processes import ControlChannel
from lean_finetune.model.precision import precision_of
from lean_finetune.pinning.code import code_hashes
from lean_finetune.plan.batch_plan import Plan, plan_settings_hash, read_plan
from lean_finetune.train.job import Paths, dotted

TRAINING = "lean_finetune.train.train_run"
"""The module whose imports are the code of a run."""
LIBRARIES = ("bitsandbytes", "numpy", "peft", "safetensors", "torch", "transformers")
KEY_DIGITS = 32
SHARING = ("sharding", "shard_group_gpus", "context_parallel", "pipeline_stages", "offload_to")
"""Parameters of `train` that decide where weights and state are stored."""
MISSING = "missing"
MOST_NAMES, MOST_DIGITS = 5, 12
"""In a message: number of names, and digits of a hash."""

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
    kernels = ("liger-kernel",) if params.train.fused_kernels == "liger" else ()
    parameters = {
        "seed": values["seed"],
        "train": {name: value for name, value in values["train"].items() if name not in SHARING},
        "bucket": plan_settings_hash(paths.plan),
        "precision": precision_of(params, paths.verdict),
    }
    sharing = {f"train.{name}": values["train"][name] for name in SHARING if name in values["train"]}
    if params.train.pipeline_stages > 1:
        sharing["stage_layers"] = read_json(paths.verdict).get("stage_layers")
    return {
        "parameters": dotted(parameters),
        "data": {
            **{f"tokens.{name}": digest for name, digest in _directory_hashes(paths.tokens).items()},
            "rows of each step": trained_rows_hash(read_plan(paths.plan)),
        },
        "model": {"model": _pinned_files(paths.model_lock), "tokenizer": _pinned_files(paths.tokenizer_lock)},
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
    more = f"; {len(others)} more differ ({', '.join(others[:MOST_NAMES])}{', …' if len(others) > MOST_NAMES else ''})"
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


def _pinned_files(lock: Path) -> str:
    """Hash the file hashes in a lock; where the files are may differ between machines."""
    return sha256_json(read_json(lock)["files"]) if lock.is_file() else MISSING
