"""Log-probabilities under the model before training: `python -m stages.reference`."""

import lean_finetune.core.signals  # noqa: F401 - first, so that Ctrl-C prints no traceback

# isort: split
from pathlib import Path

import click
import numpy as np

from cuda_memory.user_paths import PATH
from lean_finetune.config.declared_params import dotted_values, read_params
from lean_finetune.core.atomic_files import atomic_directory
from lean_finetune.core.stage_command import StageCommand, exit_on_signal
from lean_finetune.pinning.read_locks import read_model_lock
from lean_finetune.step.reference_table import SPLITS, identity, write_table


@click.command(cls=StageCommand)
@click.option("--tokens", type=PATH, default="data/tokens", show_default=True, help="Token files of stage tokenize.")
@click.option("--model-lock", type=PATH, default="locks/model.json", show_default=True, help="The pinned model.")
@click.option("--precision", type=PATH, default="data/estimate/precision.json", show_default=True, help="Of training.")
@click.option("--out", type=PATH, default="data/reference", show_default=True, help="Directory of the tables.")
def main(tokens: Path, model_lock: Path, precision: Path, out: Path) -> None:
    """Compute the log-probability of each answer under the model before training.

    Objectives that compare with a reference read it, so that training holds no second model. Other objectives get an
    empty table. No memory switch, and no parameter of the loss, changes it. A stopped run continues.
    """
    params = read_params()
    dotted_values(params)  # For objectives without a reference too, DVC compares all that decides it.
    if not params.train.goal.has_reference:
        of = identity(tokens, read_model_lock(model_lock), params.train)
        with atomic_directory(out) as aside:
            for split in SPLITS:
                write_table(aside / f"{split}.arrow", np.zeros(0, np.float32), of)
        return
    with exit_on_signal():
        from lean_finetune.evaluate.reference_run import run_stage  # Here: imports torch.

    run_stage(tokens=tokens, model_lock=model_lock, precision=precision, out=out)
