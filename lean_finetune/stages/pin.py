"""Pin the data or the model of a run: `python -m stages.pin data` or `python -m stages.pin model`."""

import lean_finetune.core.signals  # noqa: F401 - first, so that Ctrl-C prints no traceback

# isort: split
from pathlib import Path

import click

from cuda_memory.terminal import echo
from cuda_memory.user_paths import PATH
from lean_finetune.config.declared_params import read_params
from lean_finetune.core.stage_command import StageCommand
from lean_finetune.islands.pins import config_facts, named_files
from lean_finetune.pinning.data_source import pin_data
from lean_finetune.pinning.model_source import pin_model


@click.command(cls=StageCommand)
@click.argument("what", type=click.Choice(["data", "model"]))
@click.option("--locks", type=PATH, default=Path("locks"), show_default=True)
def main(what: str, locks: Path) -> None:
    """Pin the data (data.source), or the model (model.name) with an adapter (model.adapter) of params.yaml.

    A local path is pinned by the content of its files, a Hub id by its commit. Later stages read only pinned files.
    """
    p = read_params()
    if what == "data":
        if note := pin_data(p.data, locks, named_files(p.data)):
            echo(f"note: {note}", err=True)
    else:
        pin_model(
            p.model.name,
            p.model.revision,
            locks,
            adapter=p.model.adapter,
            adapter_revision=p.model.adapter_revision,
            tokens=p.train.lora.trainable_tokens,
            facts=config_facts,
        )
