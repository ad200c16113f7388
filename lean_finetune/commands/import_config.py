"""The command `lean-finetune import`: the params.yaml of a run that another tool's configuration describes."""

from pathlib import Path

import click

from cuda_memory.units import labelled
from lean_finetune.commands.convert.read_config import read_config_of_tool
from lean_finetune.commands.fit import COMMON_PARAMS
from lean_finetune.commands.params_file import change_params
from lean_finetune.config.load import PARAMS_FILE, load_params
from lean_finetune.config.overrides import with_flags
from lean_finetune.core.stage_command import StageCommand


@click.command("import", cls=StageCommand)
@click.argument("config", type=click.Path(path_type=Path))
@click.option(
    "--out", type=click.Path(path_type=Path), default=PARAMS_FILE, show_default=True, help="The file to write."
)
@click.option("--gpus", type=click.IntRange(min=1), default=1, show_default=True, help="GPUs that share the run.")
def import_config(config: Path, out: Path, gpus: int) -> None:
    """Write the params.yaml of another tool's run.

    CONFIG is a configuration of LLaMA-Factory, Axolotl, TRL, torchtune, Unsloth or ms-swift, whose shell script may
    start `swift sft`. In a checkout, the comments of its params.yaml stay, and so does its section `run`.
    """
    converted = read_config_of_tool(config, gpus)
    params = with_flags(load_params(COMMON_PARAMS), converted.flags())
    template = out if out.exists() else COMMON_PARAMS
    load_params(template)  # Refuses a file that is no params.yaml.
    values = params.model_dump()
    unchanged = {"run"} if template == out else set()
    change_params({key: value for key, value in values.items() if key not in unchanged}, template, out)
    click.echo("\n".join(converted.lines()))
    source = "" if "data.source" in converted.values else "; set data.source to your rows"
    click.echo(labelled("", f"{out}: written{source}; `dvc repro estimate` predicts its memory for your data", 0))
