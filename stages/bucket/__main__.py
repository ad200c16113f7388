"""Stage bucket: cut the training rows into optimizer steps and micro-batches."""

from pathlib import Path

import click
from tqdm import tqdm

from stages.bucket.cut import cut_steps, summarise
from stages.bucket.plan import read_plan, write_plan
from stages.bucket.steps import read_index, step_rows
from stages.declared import read_params
from stages.errors import StageCommand
from stages.files import atomic_directory, write_json


@click.command(cls=StageCommand)
@click.option("--index", "index_path", type=Path, default="data/tokens/index.arrow", show_default=True)
@click.option("--out", type=Path, default="data/batches", show_default=True, help="Directory for plan.arrow.")
@click.option("--metrics", type=Path, default="metrics/bucket.json", show_default=True)
def main(index_path: Path, out: Path, metrics: Path) -> None:
    """Plan the run: rows of every optimizer step, and its micro-batches within bucket.max_tokens padded tokens.

    The rows of a step depend on seed, train.tokens_per_step and train.epochs alone; bucket.* decides only how a step
    is cut, so it changes memory and speed and never what is learnt.
    """
    p = read_params()
    index = read_index(index_path)
    steps = step_rows(index.lengths, seed=p.seed, epochs=p.train.epochs, tokens_per_step=p.train.tokens_per_step)
    micro_batches = cut_steps(steps, index, max_tokens=p.bucket.max_tokens, pad_multiple=p.bucket.pad_multiple)
    with atomic_directory(out) as aside:
        write_plan(aside / "plan.arrow", tqdm(micro_batches, "bucket", unit=" batches", disable=not p.run.progress))
        summary = summarise(read_plan(aside / "plan.arrow"), index.lengths)
    write_json(metrics, summary)


if __name__ == "__main__":
    main()
