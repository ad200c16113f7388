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
PLACES_OF_WORK = ("scratch", "scratch/tokenize", "scratch/train", "scratch/train/running")
"""Directories that hold nothing once a run has ended well."""


def command_of(stage: str) -> tuple[str, list[str]]:
    """(module, arguments) of a stage's command in dvc.yaml."""
    _, _, module, *arguments = shlex.split(STAGES[stage]["cmd"])
    return module.removeprefix("stages."), arguments


def declared(stage: str) -> list[str]:
    """The outputs and metrics of a stage in dvc.yaml."""
    entries = [*STAGES[stage].get("outs", []), *STAGES[stage].get("metrics", [])]
    return [entry if isinstance(entry, str) else next(iter(entry)) for entry in entries]


def state(workspace: Path, stage: str) -> dict[str, str]:
    """Declared path → hash of its content but for what is of the process, or `ABSENT`."""
    return {path: digest(workspace / path) for path in declared(stage)}


def digest(path: Path) -> str:
    """Hash of a file, or of the names and files of a directory; what is of the process left out."""
    if path.is_dir():
        inside = sorted(child for child in path.rglob("*") if not child.is_dir())
        content = "\n".join(f"{child.relative_to(path)} {digest(child)}" for child in inside).encode()
    elif path.is_file():
        content = repeatable_bytes(path)
    else:
        return ABSENT
    return hashlib.sha256(content).hexdigest()


def repeatable_bytes(path: Path) -> bytes:
    """A file's bytes; those of JSON, CSV and the model card without what is of the process."""
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
    """Every path in a workspace, with what links point to, but for the places of unfinished work."""
    return sorted(
        f"{path.relative_to(workspace)}" + (f" -> {os.readlink(path)}" if path.is_symlink() else "")
        for path in workspace.rglob("*")
        if str(path.relative_to(workspace)) not in PLACES_OF_WORK
    )
