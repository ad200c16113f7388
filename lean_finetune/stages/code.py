"""Pin the code of every stage: `python -m stages.code`."""

import lean_finetune.core.signals  # noqa: F401 - first, so that Ctrl-C prints no traceback

# isort: split
from pathlib import Path

import click

from cuda_memory.user_paths import PATH
from lean_finetune.core.atomic_files import atomic_directory, sha256_file, write_json
from lean_finetune.core.stage_command import StageCommand
from lean_finetune.pinning.code import ROOT, code_hashes
from lean_finetune.pinning.locate import TINY_DIRECTORY
from lean_finetune.pinning.watched_links import follow_checkout

NOT_PINNED = ("__init__", "code")


def entries(project: Path) -> list[str]:
    """The names of a project's stages whose code is pinned."""
    return sorted({path.stem for path in (project / "stages").glob("*.py")} - {*NOT_PINNED})


def shipped_model() -> dict[str, str]:
    """Hashes of the files of the shipped model, for the stage that pins it."""
    return {path.relative_to(ROOT).as_posix(): sha256_file(path) for path in TINY_DIRECTORY.iterdir()}


@click.command(cls=StageCommand)
@click.option("--out", type=PATH, default=Path("locks/code"), show_default=True)
def main(out: Path) -> None:
    """Write one file per stage, with a hash of each module that the stage imports.

    The hashes ignore comments, docstrings and formatting, so that editing them reruns no stage.
    """
    follow_checkout(out.parent)  # Here, because DVC runs this stage before it hashes the links.
    project = Path()
    with atomic_directory(out) as aside:
        for entry in entries(project):
            hashes = code_hashes(f"stages.{entry}", project=project)
            write_json(aside / f"{entry}.json", hashes | (shipped_model() if entry == "pin" else {}))
