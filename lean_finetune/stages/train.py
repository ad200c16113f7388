"""Fine-tune the pinned model: `python -m stages.train`."""

import lean_finetune.core.signals  # noqa: F401 - first, so that Ctrl-C prints no traceback
import lean_finetune.core.torchrun_threads  # noqa: F401 - before torch, which reads the number of threads once

# isort: split
from pathlib import Path

import click

from cuda_memory.user_paths import PATH
from lean_finetune.core.stage_command import StageCommand, exit_on_signal


@click.command(cls=StageCommand)
@click.option("--tokens", type=PATH, default="data/tokens", show_default=True, help="Token files of stage tokenize.")
@click.option("--batches", type=PATH, default="data/batches", show_default=True, help="Batch plan of stage bucket.")
@click.option("--verdict", type=PATH, default="data/estimate/verdict.json", show_default=True, help="Does it fit?")
@click.option("--precision", type=PATH, default="data/estimate/precision.json", show_default=True, help="Where auto.")
@click.option("--estimate", type=PATH, default="data/estimate/figures.json", show_default=True, help="Predicted peak.")
@click.option("--reference", type=PATH, default="data/reference", show_default=True, help="Of stage reference.")
@click.option("--model-lock", type=PATH, default="locks/model.json", show_default=True, help="The pinned model.")
@click.option("--tokenizer-lock", type=PATH, default="locks/tokenizer.json", show_default=True, help="Its tokenizer.")
@click.option("--data-lock", type=PATH, default="locks/data.json", show_default=True, help="The pinned data.")
@click.option("--out", type=PATH, default="data/tuned", show_default=True, help="Adapter or model, safetensors.")
@click.option("--curves", type=PATH, default="data/train", show_default=True, help="Curves and model card.")
@click.option("--metrics", type=PATH, default="metrics/train.json", show_default=True, help="Metrics.")
def main(**paths: Path) -> None:
    """Fine-tune the pinned model on the planned batches.

    Refuses a run that is predicted not to fit (unless estimate.enforce is false), trains, and writes the weights, a
    model card, per-step curves and the measured peak memory. Exit code 3: the run does not fit, or memory ran out.
    """
    # Imported here because torch takes seconds, and --help does not need it.
    with exit_on_signal():
        from lean_finetune.train.train_run import run_stage

    run_stage(**paths)
