"""What decides the result of a training, as one key: a checkpoint is gone on from under the same key alone."""

import platform
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from stages.files import sha256_file, sha256_json

PACKAGE = Path(__file__).parents[1]
LIBRARIES = ("bitsandbytes", "numpy", "peft", "safetensors", "torch", "transformers")
KEY_DIGITS = 32


def code_files() -> list[Path]:
    """The files of this package that the process loaded: of a stage's entry, its import closure."""
    named = {Path(file) for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))}
    return sorted(file for file in named if file.suffix == ".py" and file.is_relative_to(PACKAGE))


def run_key(values: Mapping[str, Any], files: Mapping[str, Path], device: torch.device) -> str:
    """The key of a run.

    Args:
        values: what is no file: parameters, precision.
        files: what it reads, by name, directories whole. Names count, places do not: a temporary copy reads elsewhere.
        device: what computes.
    """
    cuda = device.type == "cuda"
    return sha256_json(
        {
            "values": values,
            "files": {name: _content(path) for name, path in files.items()},
            "code": {file.relative_to(PACKAGE).as_posix(): sha256_file(file) for file in code_files()},
            "device": torch.cuda.get_device_name(device) if cuda else torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
            "python": platform.python_version(),
            "libraries": {name: version(name) for name in LIBRARIES},
        }
    )[:KEY_DIGITS]


def _content(path: Path) -> str | dict[str, str]:
    """Hashes of a file's bytes, or of every file's below a directory."""
    if path.is_file():
        return sha256_file(path)
    return {file.relative_to(path).as_posix(): sha256_file(file) for file in sorted(path.rglob("*")) if file.is_file()}
