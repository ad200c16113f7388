"""Whether all processes of a run have the same settings, plan, tokens and code: each node reads its own files."""

import hashlib
import json
import platform
from collections import defaultdict
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lean_finetune.config.declared_params import tracked_values
from lean_finetune.config.schema import Params
from lean_finetune.core.atomic_files import read_json, sha256_file, sha256_json
from lean_finetune.core.errors import UserError
from lean_finetune.distributed.control_messages import ControlChannel
from lean_finetune.model.precision import precision_of
from lean_finetune.pinning.code import code_hashes
from lean_finetune.train.job import Paths
from lean_finetune.train.run_fingerprint import LIBRARIES, TRAINING

DIGITS = 12
"""Of a hash, in what is shown."""
SHOWN = 5
"""Names that a message lists."""
MISSING = "nothing"


def parts_of_run(params: Params, paths: Paths) -> dict[str, str]:
    """All that decides what a process trains, by name: a parameter's value, or the start of a hash.

    Raises:
        UserError: the verdict of stage estimate is missing.
    """
    values = tracked_values(params)
    settings = {"seed": values["seed"], "hardware": {"num_gpus": params.hardware.num_gpus}, "train": values["train"]}
    return {
        **dict(_leaves(settings)),
        "precision": precision_of(params, paths.verdict),
        paths.plan.as_posix(): _content(paths.plan),
        **{(paths.tokens / name).as_posix(): _content(paths.tokens / name) for name in _names(paths.tokens)},
        # By the hashes of its files: where a model lies may differ between machines.
        **{lock.as_posix(): _pinned(lock) for lock in (paths.model_lock, paths.tokenizer_lock)},
        **{path: digest[:DIGITS] for path, digest in code_hashes(TRAINING).items()},
        "Python": platform.python_version(),
        **{name: version(name) for name in LIBRARIES},
    }


def refuse_different_runs(parts: Mapping[str, str], channel: ControlChannel) -> None:
    """Compare `parts_of_run` of all processes, all of which call this.

    Raises:
        UserError: in every process, naming what differs, and which process has what on which machine.
    """
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()
    if len({number for (number,) in channel.gather_after_work(int.from_bytes(digest[:7], "big"))}) == 1:
        return
    of_all = [json.loads(text) for text in channel.gather_text(json.dumps([platform.node(), parts]))]
    names = dict.fromkeys(name for _, theirs in of_all for name in theirs)
    apart = [name for name in names if len({theirs.get(name, MISSING) for _, theirs in of_all}) > 1]
    first, *others = apart
    holders: dict[str, list[str]] = defaultdict(list)
    for rank, (host, theirs) in enumerate(of_all):
        holders[theirs.get(first, MISSING)].append(f"{rank} on {host}")
    got = "; ".join(f"{value} in process {', '.join(ranks)}" for value, ranks in holders.items())
    more = f"; {len(others)} more differ ({', '.join(others[:SHOWN])}{', …' if len(others) > SHOWN else ''})"
    raise UserError(
        f"{first}: must be the same in all processes of a run; got {got}{more if others else ''}; copy params.yaml, "
        "locks/, data/ and the code from one machine to the others, or use a disk that all see"
    )


def _leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys and their values, as JSON."""
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", json.dumps(value)


def _names(directory: Path) -> list[str]:
    """Files below a directory."""
    return sorted(file.relative_to(directory).as_posix() for file in directory.rglob("*") if file.is_file())


def _content(path: Path) -> str:
    """The start of a file's hash."""
    return sha256_file(path)[:DIGITS] if path.is_file() else MISSING


def _pinned(lock: Path) -> str:
    """The start of a hash of the hashes that a lock pins."""
    return sha256_json(read_json(lock)["files"])[:DIGITS] if lock.is_file() else MISSING
