"""Fingerprint of a run: all that decides its result, by kind. A checkpoint is resumed only where the kinds allow it."""

import hashlib
import platform
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lean_finetune.config.declared_params import tracked_values
from lean_finetune.config.schema import Params
from lean_finetune.core.atomic_files import sha256_file, sha256_json
from lean_finetune.pinning.code import code_hashes
from lean_finetune.plan.batch_plan import Plan, plan_settings_hash
from lean_finetune.train.loop import TrainJob

TRAINING = "lean_finetune.train.train_run"
"""The module whose imports are the code of a run."""
LIBRARIES = ("bitsandbytes", "numpy", "peft", "safetensors", "torch", "transformers")
KEY_DIGITS = 32
SHARING = ("sharding", "shard_group_gpus")
ROWS = "rows of each step"
"""Name of what the plan says of the data."""
OF_MODEL = ("model", "tokenizer")
"""Names of the files that are of the model."""


Parts = Mapping[str, Mapping[str, Any]]
"""All that decides a result: kind (parameters, data, model, code, device, threads, versions) → name → value or hash."""


def run_parts(values: Mapping[str, Any], files: Mapping[str, Path], device: torch.device, threads: int) -> Parts:
    """What decides the result of a run, by kind and name.

    Args:
        values: what is no file: parameters, precision; `ROWS` belongs to the data.
        files: what it reads, by name, directories whole. Names count, places do not: a temporary copy reads elsewhere.
        device: what computes.
        threads: of the CPU that the run was given, over all its processes on this machine.
    """
    cuda = device.type == "cuda"
    contents = {name: _content(path) for name, path in files.items()}
    parameters = {name: value for name, value in values.items() if name != ROWS}
    return {
        "parameters": dict(_leaves(parameters)),
        "data": dict(_leaves({**{name: contents[name] for name in contents if name not in OF_MODEL}, **_rows(values)})),
        "model": dict(_leaves({name: contents[name] for name in contents if name in OF_MODEL})),
        "code": code_hashes(TRAINING),
        "device": {"name": torch.cuda.get_device_name(device) if cuda else torch.backends.cpu.get_cpu_capability()},
        "threads": {"run.cpu_threads": threads},
        "versions": {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}},
    }


def run_key(record: Mapping[str, Any]) -> str:
    """The name of a run's directory: a hash of its parts, and of the runs that it resumed with others."""
    return sha256_json(record)[:KEY_DIGITS]


def differences(here: Parts, there: Parts) -> dict[str, list[str]]:
    """Kind → names of what differs; kinds in which nothing does are left out."""
    nothing: Mapping[str, Any] = {}
    apart = {
        kind: [
            name
            for name in sorted({*here.get(kind, nothing), *there.get(kind, nothing)})
            if here.get(kind, nothing).get(name) != there.get(kind, nothing).get(name)
        ]
        for kind in {**here, **there}
    }
    return {kind: names for kind, names in apart.items() if names}


def decided(params: Params, job: TrainJob, plan_file: Path) -> dict[str, Any]:
    """What of the parameters, and of the plan made with others, decides the result of a run."""
    values = tracked_values(params)
    return {
        "seed": values["seed"],
        # How GPUs share a step decides no more than rounding: another number of them goes on from the same checkpoint.
        "train": {name: value for name, value in values["train"].items() if name not in SHARING},
        "bucket": plan_settings_hash(plan_file),
        ROWS: learnt_rows(job.plan),
        "precision": job.model_spec.precision,
    }


def learnt_rows(plan: Plan) -> str:
    """A hash of what every step of a plan learns from: its rows, however they are cut and dealt to GPUs."""
    digest = hashlib.sha256()
    for start, end in pairwise(plan.bounds[plan.step_bounds].tolist()):
        digest.update(np.sort(plan.rows[start:end]).tobytes() + b"|")
    epochs = plan.epoch[plan.step_bounds[:-1]]
    return hashlib.sha256(digest.digest() + epochs.tobytes()).hexdigest()


def _content(path: Path) -> str | dict[str, str]:
    """Hashes of a file's bytes, or of every file's below a directory."""
    if path.is_file():
        return sha256_file(path)
    return {file.relative_to(path).as_posix(): sha256_file(file) for file in sorted(path.rglob("*")) if file.is_file()}


def _rows(values: Mapping[str, Any]) -> dict[str, Any]:
    """What the plan says of the data, if it is given."""
    return {ROWS: values[ROWS]} if ROWS in values else {}


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
