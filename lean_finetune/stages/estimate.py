"""Predict the peak memory of training before training: `python -m stages.estimate`."""

import lean_finetune.core.signals  # noqa: F401 - first, so that Ctrl-C prints no traceback

# isort: split
from pathlib import Path

import click

from cuda_memory.user_paths import PATH
from lean_finetune.config.declared_params import read_params
from lean_finetune.core.stage_command import StageCommand, exit_on_signal


@click.command(cls=StageCommand)
@click.option("--plan", "plan_path", type=PATH, default="data/batches/plan.arrow", show_default=True)
@click.option("--index", type=PATH, default="data/tokens/train-index.arrow", show_default=True, help="Row lengths.")
@click.option(
    "--heldout-index",
    type=PATH,
    default="data/tokens/heldout-index.arrow",
    show_default=True,
    help="Lengths of the held-out rows.",
)
@click.option("--model-lock", type=PATH, default="locks/model.json", show_default=True, help="The pinned base model.")
@click.option("--out", type=PATH, default="data/estimate", show_default=True, help="Directory for the verdict.")
@click.option("--metrics", type=PATH, default="metrics/estimate.json", show_default=True)
def main(plan_path: Path, index: Path, heldout_index: Path, model_lock: Path, out: Path, metrics: Path) -> None:
    """Predict the peak memory of training before training.

    Runs the real training step on tensors without storage, over the largest micro-batches of the plan, and counts every
    allocation and free. This stage succeeds even if the run does not fit; stage train then refuses it by the verdict.
    """
    # Imported here because torch takes seconds, and --help does not need it.
    with exit_on_signal():
        from lean_finetune.memory.advice.estimate_run import run_stage

    run_stage(read_params(), plan_path, index, heldout_index, model_lock, out, metrics)
