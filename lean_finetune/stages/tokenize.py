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

from cuda_memory.terminal import echo
from cuda_memory.user_paths import PATH
from lean_finetune.config.declared_params import read_params  # noqa: E402
from lean_finetune.core.stage_command import StageCommand  # noqa: E402
from lean_finetune.data.shards.tokenize_job import prepare_job  # noqa: E402
from lean_finetune.data.shards.tokenize_run import tokenize_all  # noqa: E402
from lean_finetune.pinning.locate import tokenizer_directory, verify_files  # noqa: E402
from lean_finetune.pinning.read_locks import read_data_lock, read_model_lock, read_tokenizer_lock  # noqa: E402


@click.command(cls=StageCommand)
@click.option("--data-lock", type=PATH, default=Path("locks/data.json"), show_default=True)
@click.option("--model-lock", type=PATH, default=Path("locks/model.json"), show_default=True)
@click.option("--tokenizer-lock", type=PATH, default=Path("locks/tokenizer.json"), show_default=True)
@click.option("--out", type=PATH, default=Path("data/tokens"), show_default=True)
def main(data_lock: Path, model_lock: Path, tokenizer_lock: Path, out: Path) -> None:
    """Tokenize the pinned rows, mark the trained spans, and split the rows into training and held-out ones."""
    p = read_params()
    data, tokenizer = read_data_lock(data_lock), read_tokenizer_lock(tokenizer_lock)
    directory = tokenizer_directory(read_model_lock(model_lock))
    files = verify_files(directory, tokenizer["files"])
    job = prepare_job(
        *(p.data, p.run.tokenizer_engine, data, tokenizer, directory), kind=p.train.row_kind, scored=p.train.scores
    )
    job = replace(job, tokenizer_files=files)
    for note in tokenize_all(job, p.run, out, _note):
        _note(note)


def _note(text: str) -> None:
    """Print a note for the user."""
    echo(f"note: {text}", err=True)
