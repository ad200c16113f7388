"""Divide the training rows into optimizer steps and micro-batches: `python -m stages.bucket`."""

import lean_finetune.core.signals  # noqa: F401 - first, so that Ctrl-C prints no traceback

# isort: split
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from cuda_memory.terminal import echo
from cuda_memory.user_paths import PATH
from lean_finetune.config.declared_params import read_params
from lean_finetune.core.atomic_files import FIGURES, atomic_directory, sha256_json, write_sealed
from lean_finetune.core.progress import progress_bar
from lean_finetune.core.stage_command import StageCommand
from lean_finetune.plan.batch_plan import Plan, read_plan, write_plan
from lean_finetune.plan.optimizer_steps import read_index, source_weights
from lean_finetune.plan.planner import PlanSettings, few_steps_note, summarise
from lean_finetune.plan.step_tokens import step_tokens_of


@click.command(cls=StageCommand)
@click.option("--index", "index_path", type=PATH, default="data/tokens/train-index.arrow", show_default=True)
@click.option("--out", type=PATH, default="data/batches", show_default=True, help="Directory for plan.arrow.")
def main(index_path: Path, out: Path) -> None:
    """Plan the rows of every optimizer step and its micro-batches, divided evenly among hardware.num_gpus.

    The rows of a step depend only on seed, train.tokens_per_step, train.epochs and the sources' weights. bucket.* only
    divides a step into micro-batches, so it changes memory and speed and never the training result.
    """
    p = read_params()
    train = p.train
    index = read_index(index_path, source_weights(p.data.source), train.row_kind)
    step = step_tokens_of(index, train)
    if step.is_auto:
        echo(step.text, err=True)
    run = PlanSettings.from_params(p, step.tokens)
    with atomic_directory(out) as aside:
        parts = _shown(run.parts(index), p.run.progress)
        write_plan(
            aside / "plan.arrow",
            parts,
            settings_hash=sha256_json(run.micro_batches.deciding),
            auto_step_tokens=step.tokens if step.is_auto else None,
        )
        plan = read_plan(aside / "plan.arrow")
        summary = summarise(plan, index.lengths, mode=run.micro_batches.mode)
        chosen = {"tokens_per_step": step.tokens, "tokens_per_step_auto": step.reason if step.is_auto else None}
        write_sealed(aside / FIGURES, summary | chosen)
        rows, mean_length = len(plan.rows), float(index.lengths[plan.rows].mean())
    few = few_steps_note(
        summary["optimizer_steps"],
        rows,
        mean_length=mean_length,
        tokens_per_step=step.tokens,
        epochs=train.epochs,
        is_auto=step.is_auto,
    )
    if few is not None:
        echo(f"note: {few}", err=True)


def _shown(parts: Iterable[Plan], progress: bool) -> Iterator[Plan]:
    """The parts of a plan, with a progress bar."""
    with progress_bar(desc="bucket", unit=" rows", unit_scale=True, disable=not progress) as bar:
        for part in parts:
            yield part
            bar.update(len(part.rows))
