"""The command `lean-finetune preset`: write a starting point into params.yaml."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from lean_finetune.commands.params_file import change_params
from lean_finetune.config.load import PARAMS_FILE
from lean_finetune.core.errors import UsageFault, UserError
from lean_finetune.core.read_yaml import read_yaml
from lean_finetune.core.stage_command import StageCommand

PRESETS = Path(__file__).parents[1] / "presets"
"""One YAML file for each: its first line says what it is for, the rest are the parameters that it sets."""
OWN = Path("presets")
"""The user's own, in the working directory."""


def preset_names(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Known presets, for the shell's completion."""
    return sorted(name for name in presets() if name.startswith(incomplete))


def presets() -> dict[str, Path]:
    """The file of each preset by its name; one of the user's own replaces another of that name."""
    return {path.stem: path for directory in (PRESETS, OWN) for path in sorted(directory.glob("*.yaml"))}


@click.command(cls=StageCommand)
@click.argument("name", required=False, shell_complete=preset_names)
def preset(name: str | None) -> None:
    """Write the parameters of a preset into params.yaml; without NAME, list the presets.

    Parameters that the preset does not name keep their values, such as data.source. A file of your own in presets/ is a
    preset too.
    """
    if name is None:
        click.echo("\n".join(_descriptions()))
        return
    file = presets().get(name)
    if file is None:
        raise UsageFault(f"NAME: must be one of {', '.join(presets())}, or a file in {OWN}/ without .yaml; got {name}")
    changed = apply_preset(file, PARAMS_FILE)
    click.echo("\n".join(f"{key}: {'' if value is None else value}" for key, value in changed.items()) or "no change")


def apply_preset(file: Path, params: Path) -> dict[str, Any]:
    """Write a preset into a params.yaml, whose comments stay; return the parameters that changed by dotted key.

    Raises:
        UserError: there is no params.yaml, or the parameters together are wrong. Nothing is written then.
    """
    values = read_yaml(file, "no such preset")
    if not isinstance(values, Mapping):
        raise UserError(f"{file}: must be a mapping of sections; got {type(values).__name__}; change it")
    return change_params(values, params, params)


def _descriptions() -> list[str]:
    """One line for each preset: its name, and the first line of its file."""
    files = presets()
    width = max(map(len, files))
    first_lines = (file.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ") for file in files.values())
    return [f"{name:<{width}}  {line}" for name, line in zip(files, first_lines, strict=True)]
