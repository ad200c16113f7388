"""Compare the base and the tuned model on held-out rows: `python -m stages.evaluate`."""

import lean_finetune.core.signals  # noqa: F401 - first, so that Ctrl-C prints no traceback

# isort: split
from pathlib import Path

import click

from cuda_memory.user_paths import PATH
from lean_finetune.core.stage_command import StageCommand, exit_on_signal


@click.command(cls=StageCommand)
@click.option("--tokens", type=PATH, default="data/tokens", show_default=True, help="Token files of stage tokenize.")
@click.option("--model-lock", type=PATH, default="locks/model.json", show_default=True, help="The pinned base model.")
@click.option("--tokenizer-lock", type=PATH, default="locks/tokenizer.json", show_default=True, help="Its tokenizer.")
@click.option("--reference", type=PATH, default="data/reference", show_default=True, help="Output of stage reference.")
@click.option("--tuned", type=PATH, default="data/tuned", show_default=True, help="Adapter or model of stage train.")
@click.option("--precision", type=PATH, default="data/estimate/precision.json", show_default=True, help="Of training.")
@click.option("--out", type=PATH, default="data/evaluate", show_default=True, help="Directory of generations.jsonl.")
@click.option("--metrics", type=PATH, default="metrics/evaluate.json", show_default=True, help="Metrics.")
def main(**paths: Path) -> None:
    """Compare the base and the tuned model on held-out rows.

    Writes loss and perplexity of the trained tokens, overall and by row length, and exact match of greedy answers by
    task family. Of preference pairs, also rewards, the share in the right order, and the pairs whose order changed. The
    base model is loaded as for training (4-bit for qlora), so that only training makes a difference.
    """
    with exit_on_signal():
        from lean_finetune.evaluate.evaluate_run import run_stage  # Here: imports torch, which --help skips.

    run_stage(**paths)
