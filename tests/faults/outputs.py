"""Outputs of a stage as hashes that can be compared."""

import csv
import hashlib
import json
import os
import re
import shlex
from pathlib import Path

from ruamel.yaml import YAML

from tests.conftest import ROOT
from tests.repeatable import OF_THE_PROCESS, repeatable

STAGES = YAML(typ="safe").load((ROOT / "dvc.yaml").read_text())["stages"]
ABSENT = "absent"
PLACES_OF_WORK = ("scratch", "scratch/reference", "scratch/tokenize", "scratch/train", "scratch/train/running")
"""Directories that are empty after a successful run."""


def command_of(stage: str) -> tuple[str, list[str]]:
    """(module, arguments) of a stage's command in dvc.yaml."""
    _, _, module, *arguments = shlex.split(STAGES[stage]["cmd"])
    return module.removeprefix("stages."), arguments


def declared(stage: str) -> list[str]:
    """The outputs and metrics of a stage in dvc.yaml."""
    entries = [*STAGES[stage].get("outs", []), *STAGES[stage].get("metrics", [])]
    return [entry if isinstance(entry, str) else next(iter(entry)) for entry in entries]


def state(workspace: Path, stage: str) -> dict[str, str]:
    """Return hashes by declared path, without entries that differ between equal runs; `ABSENT` for a missing path."""
    return {path: digest(workspace / path) for path in declared(stage)}


def digest(path: Path) -> str:
    """Hash a file, or the names and files of a directory, without entries that differ between equal runs."""
    if path.is_dir():
        inside = sorted(child for child in path.rglob("*") if not child.is_dir())
        content = "\n".join(f"{child.relative_to(path)} {digest(child)}" for child in inside).encode()
    elif path.is_file():
        content = repeatable_bytes(path)
    else:
        return ABSENT
    return hashlib.sha256(content).hexdigest()


def repeatable_bytes(path: Path) -> bytes:
    """Read a file; leave out entries of JSON, CSV and the model card that differ between equal runs."""
    content = path.read_bytes()
    if path.suffix == ".json":
        return json.dumps(repeatable(json.loads(content)), sort_keys=True).encode()
    if path.suffix == ".csv":
        rows = list(csv.DictReader(content.decode().splitlines()))
        return json.dumps(repeatable(rows)).encode()
    if path.name == "MODEL_CARD.md":
        lines = content.decode().splitlines()
        lines = [line for line in lines if not any(map(OF_THE_PROCESS.search, re.findall(r"\w+", line)))]
        return "\n".join(lines).encode()
    return content


def listing(workspace: Path) -> list[str]:
    """Return all paths in a workspace, with the targets of links, except directories of unfinished work."""
    return sorted(
        f"{path.relative_to(workspace)}" + (f" -> {os.readlink(path)}" if path.is_symlink() else "")
        for path in workspace.rglob("*")
        if str(path.relative_to(workspace)) not in PLACES_OF_WORK
    )
