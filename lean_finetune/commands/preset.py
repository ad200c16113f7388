"""The command `lean-finetune preset`: write a starting point from presets/ into params.yaml."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from lean_finetune.commands.params_file import change_params
from lean_finetune.config.load import PARAMS_FILE
from lean_finetune.core.errors import UsageFault, UserError
from lean_finetune.core.read_yaml import read_yaml
from lean_finetune.core.stage_command import StageCommand

PRESETS = Path("presets")
"""One YAML file for each: its first line says what it is for, the rest are the parameters that it sets."""


def preset_names(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Known presets, for the shell's completion."""
    return sorted(path.stem for path in PRESETS.glob(f"{incomplete}*.yaml"))


@click.command(cls=StageCommand)
@click.argument("name", required=False, shell_complete=preset_names)
def preset(name: str | None) -> None:
    """Write the parameters of presets/NAME.yaml into params.yaml; without NAME, list the presets.

    Parameters that the preset does not name keep their values, such as data.source.
    """
    if name is None:
        click.echo("\n".join(_descriptions()))
        return
    if Path(name).name != name:
        raise UsageFault(f"NAME: must be the name of a file in {PRESETS}/ without .yaml; got {name}; name one of them")
    changed = apply_preset(PRESETS / f"{name}.yaml", PARAMS_FILE)
    click.echo("\n".join(f"{key}: {'' if value is None else value}" for key, value in changed.items()) or "no change")


def apply_preset(file: Path, params: Path) -> dict[str, Any]:
    """Write a preset into a params.yaml, whose comments stay; return the parameters that changed by dotted key.

    Raises:
        UserError: there is no such preset, or the parameters together are wrong. Nothing is written then.
    """
    if not file.is_file():
        raise UsageFault(f"{file}: no such preset; `lean-finetune preset` lists them")
    values = read_yaml(file, "no such preset")
    if not isinstance(values, Mapping):
        raise UserError(f"{file}: must be a mapping of sections; got {type(values).__name__}; change it")
    return change_params(values, params, params)


def _descriptions() -> list[str]:
    """One line for each preset: its name, and the first line of its file.

    Raises:
        UserError: the working directory has no presets.
    """
    files = sorted(PRESETS.glob("*.yaml"))
    if not files:
        raise UserError(f"{PRESETS}: not found; run from the root of a checkout of the project")
    width = max(len(file.stem) for file in files)
    first_lines = [file.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ") for file in files]
    return [f"{file.stem:<{width}}  {line}" for file, line in zip(files, first_lines, strict=True)]
