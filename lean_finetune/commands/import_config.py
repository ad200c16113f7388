"""The command `lean-finetune import`: the params.yaml of a run that another tool's configuration describes."""

from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

import click

from lean_finetune.commands.convert import read_config_of_tool
from lean_finetune.commands.fit import COMMON_PARAMS
from lean_finetune.commands.text import labelled
from lean_finetune.config.load import PARAMS_FILE, load_params
from lean_finetune.config.overrides import with_flags
from lean_finetune.core.atomic_files import atomic_path
from lean_finetune.core.errors import StageCommand

WIDTH = 10**6
"""Lines are not wrapped: `dvc exp run -S` rewrites the file in the same form."""


@click.command("import", cls=StageCommand)
@click.argument("config", type=click.Path(path_type=Path))
@click.option(
    "--out", type=click.Path(path_type=Path), default=PARAMS_FILE, show_default=True, help="The file to write."
)
@click.option("--gpus", type=click.IntRange(min=1), default=1, show_default=True, help="GPUs that share the run.")
def import_config(config: Path, out: Path, gpus: int) -> None:
    """Write the params.yaml of the run that CONFIG of LLaMA-Factory, Axolotl, TRL or torchtune describes.

    In a checkout, the comments of its params.yaml stay, and so does its section `run`.
    """
    from ruamel.yaml import YAML

    converted = read_config_of_tool(config, gpus)
    params = with_flags(load_params(COMMON_PARAMS), converted.flags())
    yaml = YAML(typ="rt")
    yaml.width = WIDTH
    template = out if out.exists() else COMMON_PARAMS
    content = yaml.load(template.read_text(encoding="utf-8"))
    load_params(template)  # Refuses a file that is no params.yaml.
    values = params.model_dump()
    update(content, {key: value for key, value in values.items() if key != "run" or template == COMMON_PARAMS})
    with atomic_path(out) as path:
        yaml.dump(content, path)
    click.echo("\n".join(converted.lines()))
    source = "" if "data.source" in converted.values else "; set data.source to your rows"
    click.echo(labelled("", f"{out}: written{source}; `dvc repro estimate` predicts its memory for your data", 0))


def update(content: MutableMapping[str, Any], values: Mapping[str, Any]) -> None:
    """Set values that differ, so that the rest of a file stays as it is."""
    for key, value in values.items():
        if isinstance(value, Mapping) and isinstance(content.get(key), MutableMapping):
            update(content[key], value)
        elif content.get(key) != value or key not in content:
            content[key] = value
