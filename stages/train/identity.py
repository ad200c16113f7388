"""What decides the result of a training, as one key: a checkpoint is gone on from under the same key alone."""

import hashlib
import platform
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stages.bucket.plan import Plan, how_cut
from stages.declared import tracked_values
from stages.dist.agree import Voices
from stages.files import sha256_file, sha256_json
from stages.params import Params
from stages.train.loop import TrainJob

PACKAGE = Path(__file__).parents[1]
LIBRARIES = ("bitsandbytes", "numpy", "peft", "safetensors", "torch", "transformers")
KEY_DIGITS = 32
SHARING = ("sharding", "shard_group_gpus")


def code_files() -> list[Path]:
    """The files of this package that the process loaded: of a stage's entry, its import closure."""
    named = {Path(file) for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))}
    return sorted(file for file in named if file.suffix == ".py" and file.is_relative_to(PACKAGE))


def run_key(values: Mapping[str, Any], files: Mapping[str, Path], device: torch.device, threads: int) -> str:
    """The key of a run.

    Args:
        values: what is no file: parameters, precision.
        files: what it reads, by name, directories whole. Names count, places do not: a temporary copy reads elsewhere.
        device: what computes.
        threads: of the CPU that the run was given, over all its processes on this machine.
    """
    cuda = device.type == "cuda"
    return sha256_json(
        {
            "values": values,
            "files": {name: _content(path) for name, path in files.items()},
            "code": {file.relative_to(PACKAGE).as_posix(): sha256_file(file) for file in code_files()},
            "device": torch.cuda.get_device_name(device) if cuda else torch.backends.cpu.get_cpu_capability(),
            "threads": threads,
            "python": platform.python_version(),
            "libraries": {name: version(name) for name in LIBRARIES},
        }
    )[:KEY_DIGITS]


def key_of_all(make: Callable[[], str], voices: Voices) -> str:
    """The key that the first process makes, in every process: what it is of is read once."""
    digits = bytes.fromhex(make()) if voices.leads else bytes(KEY_DIGITS // 2)
    return bytes(voices.of_first(*digits)).hex()


def decided(params: Params, job: TrainJob, plan_file: Path) -> dict[str, Any]:
    """What of the parameters, and of the plan made with others, decides the result of a run."""
    values = tracked_values(params)
    return {
        "seed": values["seed"],
        # How GPUs share a step decides no more than rounding: another number of them goes on from the same checkpoint.
        "train": {name: value for name, value in values["train"].items() if name not in SHARING},
        "cut": how_cut(plan_file),
        "rows": learnt_rows(job.plan),
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
