"""The command `lean-finetune`, which works in any directory without a pipeline."""

from pathlib import Path

import click

from lean_finetune.config.load import PARAMS_FILE, load_params
from lean_finetune.core.errors import StageCommand
from lean_finetune.core.units import GIB
from lean_finetune.memory.gpus import GPUS

PATH = click.Path(path_type=Path)
COMMON_PARAMS = Path(__file__).with_name("fit_params.yaml")
"""Parameters for `fit` where there is no params.yaml."""
COMMON_RUN = "defaults of this command: QLoRA, rows of up to 4096 tokens"


@click.group()
def main() -> None:
    """Predict whether fine-tuning fits a GPU, and explain memory that grows."""


@main.command(cls=StageCommand)
@click.option("--model", type=PATH, help="A config.json or its directory. Default: model.name.")
@click.option("--gpu", help="A known GPU or a size such as 24GiB. Default: hardware.gpu.")
@click.option(
    "--params",
    type=PATH,
    help="Parameters of the run. Default: ./params.yaml if it exists, else QLoRA on rows of up to 4096 tokens.",
)
@click.option("--list-gpus", is_flag=True, help="List the known GPUs and exit.")
def fit(model: Path | None, gpu: str | None, params: Path | None, list_gpus: bool) -> None:
    """Predict whether a run fits a GPU. Needs only a config.json: no weights, data or GPU.

    Prints the peak memory of each phase, the verdict, settings that fit if the run does not, the smallest GPU for the
    run, the longest row and the largest micro-batch.
    """
    if list_gpus:
        click.echo(f"{'name':<18}{'memory GiB':>11}{'bf16':>6}{'compute capability':>20}")
        for known in GPUS:
            bf16 = "yes" if known.native_bf16 else "no"
            capability = ".".join(map(str, known.compute_capability))
            click.echo(f"{known.name:<18}{known.memory_bytes / GIB:>11.2f}{bf16:>6}{capability:>20}")
        return
    file = params or (PARAMS_FILE if PARAMS_FILE.exists() else COMMON_PARAMS)
    p = load_params(file)
    from lean_finetune.memory.advice.fit_command import fit_report, labelled  # Here: imports torch, which --help skips.

    common = file == COMMON_PARAMS
    click.echo(labelled("params", COMMON_RUN if common else str(file)))
    for text in fit_report(p, gpu, model, shorten=common):
        click.echo(text)


@main.command(cls=StageCommand)
@click.argument("curve", type=PATH)
@click.option("--left-gib", type=click.FloatRange(min=0), help="Free memory in GiB at the end of the curve.")
def explain(curve: Path, left_gib: float | None) -> None:
    """Explain why memory grows in CURVE, a CSV file with one line per training step.

    It needs the column `step` and one of `allocated_gib`, `reserved_gib` and `rss_gib`. A column `tokens` helps.
    """
    from lean_finetune.train.monitor.recorded_curves import explained

    click.echo("\n".join(explained(curve, left_gib)))


if __name__ == "__main__":
    main()
