"""Stage tokenize: turns the pinned rows into tokens."""

import lean_finetune.core.signals  # noqa: F401 - first: it installs the signal handlers

# isort: split
import os

# Before numpy is imported: without its threads, worker processes can be forks.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Each worker uses one core.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RAYON_NUM_THREADS", "1")

from dataclasses import replace  # noqa: E402
from pathlib import Path  # noqa: E402

import click  # noqa: E402

from lean_finetune.config.declared_params import read_params  # noqa: E402
from lean_finetune.core.atomic_files import read_json  # noqa: E402
from lean_finetune.core.errors import UsageFault  # noqa: E402
from lean_finetune.core.stage_command import StageCommand  # noqa: E402
from lean_finetune.data.shards.parts import collect, parse_part  # noqa: E402
from lean_finetune.data.shards.publish_tokens import publish  # noqa: E402
from lean_finetune.data.shards.tokenize_job import prepare_job  # noqa: E402
from lean_finetune.data.shards.tokenize_run import tokenize_all, tokenize_part  # noqa: E402
from lean_finetune.pinning.locate import read_tokenizer_lock, tokenizer_directory, verify_files  # noqa: E402

PATH = click.Path(path_type=Path)


@click.command(cls=StageCommand)
@click.option("--data-lock", type=PATH, default=Path("locks/data.json"), show_default=True)
@click.option("--model-lock", type=PATH, default=Path("locks/model.json"), show_default=True)
@click.option("--tokenizer-lock", type=PATH, default=Path("locks/tokenizer.json"), show_default=True)
@click.option("--out", type=PATH, default=Path("data/tokens"), show_default=True)
@click.option("--part", metavar="I/N", help="Make only part I (from 0) of N, below --out, to be merged later.")
@click.option("--merge", is_flag=True, help="Join the parts below DIRECTORIES, instead of tokenizing.")
@click.argument("directories", nargs=-1, type=PATH)
def main(
    data_lock: Path,
    model_lock: Path,
    tokenizer_lock: Path,
    out: Path,
    part: str | None,
    merge: bool,
    directories: tuple[Path, ...],
) -> None:
    """Tokenize the pinned rows, mark the trained spans, and split the rows into training and held-out ones.

    On several machines, run `--part I/N --out DIRECTORY` on each, then `--merge DIRECTORY...`: the bytes are the same.
    """
    if bool(directories) != merge or (merge and part):
        raise UsageFault(
            "--merge: needs directories of parts, and directories need --merge; --part cannot be combined with them"
        )
    chosen = None if part is None else parse_part(part)
    p = read_params()
    data, tokenizer = read_json(data_lock), read_tokenizer_lock(tokenizer_lock)
    directory = tokenizer_directory(read_json(model_lock))
    files = verify_files(directory, tokenizer["files"])
    engine = "tokenizers" if merge else p.run.tokenizer_engine
    job = replace(prepare_job(p.data, engine, data, tokenizer, directory), tokenizer_files=files)
    if chosen is not None:
        notes = tokenize_part(job, p.run, chosen, out, _note)
    elif merge:
        notes = publish(job, collect(directories, job.inputs, job.key), out)
    else:
        notes = tokenize_all(job, p.run, out, _note)
    for note in notes:
        _note(note)


def _note(text: str) -> None:
    """Print a note for the user."""
    click.echo(f"note: {text}", err=True)


if __name__ == "__main__":
    main()
