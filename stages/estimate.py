"""Predict the peak memory of training before training: `python -m stages.estimate`."""

import lean_finetune.core.signals  # noqa: F401 - first: Ctrl-C ends in silence from here on, and the others take seconds to import

# isort: split
from pathlib import Path

import click

from lean_finetune.config.declared_params import read_params
from lean_finetune.core.errors import StageCommand, UserError
from lean_finetune.core.units import GIB
from lean_finetune.memory.gpus import GPUS

PATH = click.Path(path_type=Path)


@click.command(cls=StageCommand)
@click.option("--plan", "plan_path", type=PATH, default="data/batches/plan.arrow", show_default=True)
@click.option("--index", type=PATH, default="data/tokens/train-index.arrow", show_default=True, help="Row lengths.")
@click.option("--model-lock", type=PATH, default="locks/model.json", show_default=True, help="The pinned base.")
@click.option("--out", type=PATH, default="data/estimate", show_default=True, help="Directory for the verdict.")
@click.option("--metrics", type=PATH, default="metrics/estimate.json", show_default=True)
@click.option("--list-gpus", is_flag=True, help="List the known GPUs and end.")
@click.option("--what-fits", is_flag=True, help="Tell what fits, from params.yaml and a config alone, and end.")
@click.option("--gpu", help="With --what-fits: the device in place of hardware.gpu.")
@click.option("--model", type=PATH, help="With --what-fits: a directory or config.json in place of model.name.")
def main(
    plan_path: Path,
    index: Path,
    model_lock: Path,
    out: Path,
    metrics: Path,
    list_gpus: bool,
    what_fits: bool,
    gpu: str | None,
    model: Path | None,
) -> None:
    """Predict the peak memory of training before training.

    The training step itself runs on tensors without storage, over the worst micro-batches of the real plan; every
    allocation and free is counted. A run that does not fit ends this stage well: its verdict makes train refuse.
    """
    if list_gpus:
        return _list_gpus()
    if (gpu is not None or model is not None) and not what_fits:
        raise UserError("--gpu, --model: have an effect only with --what-fits; the stage reads params.yaml; add it")
    p = read_params()
    # The modules below import torch, which takes seconds: --help and --list-gpus do without.
    if what_fits:
        from lean_finetune.memory.advice.fit_command import tell_what_fits

        for line in tell_what_fits(p, gpu, model):
            click.echo(line)
        return
    from lean_finetune.memory.estimate.estimate_run import run_stage

    run_stage(p, plan_path, index, model_lock, out, metrics)


def _list_gpus() -> None:
    """Print the table of known GPUs."""
    click.echo(f"{'name':<18}{'memory GiB':>11}{'bf16':>6}{'compute capability':>20}")
    for gpu in GPUS:
        major, minor = gpu.compute_capability
        bf16 = "yes" if gpu.native_bf16 else "no"
        click.echo(f"{gpu.name:<18}{gpu.memory_bytes / GIB:>11.2f}{bf16:>6}{f'{major}.{minor}':>20}")


if __name__ == "__main__":
    main()
