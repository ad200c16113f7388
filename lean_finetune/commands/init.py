"""The command `lean-finetune init`: make a project, or bring one to the installed version."""

import sys
from pathlib import Path
from typing import get_args

import click

from cuda_memory.gpus import gpu_names
from cuda_memory.terminal import echo
from cuda_memory.user_paths import text_path
from lean_finetune.commands.project.create import Choices, create_project
from lean_finetune.commands.project.upgrade import apply_upgrade, find_upgrade, version_line
from lean_finetune.config.field_types import Method
from lean_finetune.core.errors import UsageFault
from lean_finetune.core.stage_command import StageCommand


@click.command(cls=StageCommand)
@click.argument("directory", required=False)
@click.option(
    "--model", help="A directory, or a hub id such as Qwen/Qwen3-8B. By default a tiny model for a first try."
)
@click.option("--data", help="Your rows: a file, a glob, a directory or hf://org/name. By default a small sample.")
@click.option("--gpu", shell_complete=gpu_names, help="A known GPU, a size such as 24GiB, or auto: this machine's.")
@click.option("--method", type=click.Choice(get_args(Method), case_sensitive=False), help="What is trained.")
@click.option("--check", is_flag=True, help="Say what differs from the files of this version; change nothing.")
@click.option("--upgrade", is_flag=True, help="Bring a project to this version. What you edited stays.")
def init(directory: str | None, check: bool, upgrade: bool, **values: str | None) -> None:
    """Make DIRECTORY a project: parameters, pipeline, git and DVC. `dvc repro` trains there.

    No file of yours is overwritten, and nothing is committed. Paths are written relative to DIRECTORY if they are in
    it, else absolute. With --model, the run is that of `lean-finetune fit`.

    For example: lean-finetune init my-run --model Qwen/Qwen3-8B --data rows.jsonl --gpu RTX-4090
    """
    if check or upgrade:
        if any(value is not None for value in values.values()) or (check and upgrade):
            raise UsageFault("--check, --upgrade: take no other option")
        _upgrade(text_path("." if directory is None else directory, "DIRECTORY"), write=upgrade)
        return
    if not directory:  # Also "", such as that of an unset variable of a shell, which would be this directory.
        raise UsageFault("DIRECTORY: is missing; name one, or . for this one")
    model, data, gpu, method = (values[name] for name in ("model", "data", "gpu", "method"))
    choices = Choices(model=model, data=data, gpu=gpu, method=method)
    for line in create_project(text_path(directory, "DIRECTORY"), choices):
        echo(line)


def _upgrade(directory: Path, *, write: bool) -> None:
    """Print what differs from the template, and write it or exit with code 1."""
    found = find_upgrade(directory)
    for each in (version_line(directory, found), *(f"  {line}" for line in found.lines)):
        echo(each)
    if write:
        apply_upgrade(directory, found)
        echo("upgraded; `git diff` shows it" if found.needed else "nothing to upgrade")
    elif found.needed:
        echo("`lean-finetune init --upgrade` changes all of these that do not stay")
        sys.exit(1)
