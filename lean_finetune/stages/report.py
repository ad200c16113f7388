"""Write the report of a run: `python -m stages.report`."""

import lean_finetune.core.signals  # noqa: F401 - first, so that Ctrl-C prints no traceback

# isort: split
from pathlib import Path

import click

from cuda_memory.terminal import echo
from cuda_memory.user_paths import PATH
from lean_finetune.config.declared_params import dotted_values, read_params
from lean_finetune.core.atomic_files import FIGURES, atomic_directory, write_csv, write_json, write_text
from lean_finetune.core.stage_command import StageCommand
from lean_finetune.report.content import MEMORY_COLUMNS, RESULTS, memory_records, report_metrics, summary
from lean_finetune.report.pages import html_page, markdown_page
from lean_finetune.report.pairs import REWARD_COLUMNS, reward_records
from lean_finetune.report.report_inputs import Inputs


@click.command(cls=StageCommand)
@click.option("--locks", type=PATH, default="locks", show_default=True, help="Directory of the pins.")
@click.option("--metrics", type=PATH, default="metrics", show_default=True, help="Directory of all metrics.")
@click.option("--tokens", type=PATH, default="data/tokens", show_default=True, help="Output of stage tokenize.")
@click.option("--batches", type=PATH, default="data/batches", show_default=True, help="Output of stage bucket.")
@click.option("--estimate", type=PATH, default="data/estimate", show_default=True, help="Output of stage estimate.")
@click.option("--train", type=PATH, default="data/train", show_default=True, help="Curves of stage train.")
@click.option("--tuned", type=PATH, default="data/tuned", show_default=True, help="Weights, for their tokenizer.")
@click.option("--evaluate", type=PATH, default="data/evaluate", show_default=True, help="Output of stage evaluate.")
@click.option("--out", type=PATH, default="data/report", show_default=True, help="Directory of the pages.")
def main(metrics: Path, out: Path, **places: Path) -> None:
    """Write report.html, one page with charts, and report.md for terminals: memory, loss, data, answers.

    Also writes metrics/report.json (the prediction's error in percent) and memory.csv for `dvc plots`, of
    preference pairs rewards.csv too.
    """
    parameters = dotted_values(read_params())
    inputs = Inputs(**places)
    figures = report_metrics(inputs)
    with atomic_directory(out) as directory:
        write_csv(directory / "memory.csv", MEMORY_COLUMNS, memory_records(inputs))
        if rewards := list(reward_records(inputs)):
            write_csv(directory / "rewards.csv", REWARD_COLUMNS, rewards)
        write_text(directory / "report.html", html_page(inputs, parameters, figures))
        write_text(directory / "report.md", markdown_page(inputs, parameters, figures))
        write_json(directory / FIGURES, figures)
    write_json(metrics / "report.json", {name: figures[name] for name in RESULTS})
    echo(f"report: {summary(inputs)}; open {out / 'report.html'}")
