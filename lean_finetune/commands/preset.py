"""The commands that write params.yaml: `preset` and `import`."""

from pathlib import Path

import click

from cuda_memory.terminal import echo, echo_text
from cuda_memory.units import labelled
from cuda_memory.user_paths import PATH, no_option, output_file, shell_line
from lean_finetune.commands.convert.conversions import Converted
from lean_finetune.commands.convert.read_config import read_config_of_tool
from lean_finetune.commands.project.params_file import OWN, apply_preset, change_params, presets
from lean_finetune.config.load import COMMON_PARAMS, PARAMS_FILE, load_params, with_flags
from lean_finetune.config.other_tools import tables
from lean_finetune.config.schema import Params
from lean_finetune.core.errors import LONGEST_LINE, UsageFault, UserError, shortened
from lean_finetune.core.stage_command import StageCommand
from lean_finetune.pinning.hub import gated_note
from lean_finetune.pinning.locate import find_model

# The command `lean-finetune preset`: write a starting point into params.yaml.


def preset_names(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Known presets, for the shell's completion."""
    return sorted(name for name in presets() if name.startswith(incomplete))


@click.command(cls=StageCommand)
@click.argument("name", required=False, shell_complete=preset_names)
def preset(name: str | None) -> None:
    """Write the parameters of a preset into params.yaml; without NAME, list the presets.

    Parameters that the preset does not name keep their values, such as data.source; memory switches that it does not
    name are turned off. A file of your own in presets/ is a preset too, which changes what it names alone.
    """
    if name is None:
        for line in _descriptions():
            echo(line)
        return
    file = presets().get(name)
    if file is None:
        raise UsageFault(
            f"NAME: must be one of {', '.join(presets())}, or a file in {OWN}/ without .yaml; got {shortened(name)}"
        )
    changed = apply_preset(file, PARAMS_FILE)
    for key, value in changed.items():
        echo(f"{key}: {'' if value is None else value}")
    if not changed:
        echo("no change")
    if (note := gated_note(str(changed.get("model.name", "")))) is not None:
        echo(f"note: {note}", err=True)


def _descriptions() -> list[str]:
    """One line for each preset: its name, and the first line of its file."""
    files = presets()
    width = max(map(len, files))
    return [f"{name:<{width}}  {_first_line(file)}" for name, file in files.items()]


def _first_line(file: Path) -> str:
    """What a preset is for, or why that cannot be read."""
    try:
        with file.open("rb") as lines:
            return lines.readline(LONGEST_LINE).decode().strip().removeprefix("# ")
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    except UnicodeDecodeError:
        return "cannot be read (not UTF-8): save it as UTF-8"


# The command `lean-finetune import`: the params.yaml of a run that another tool's configuration describes.


@click.command("import", cls=StageCommand)
@click.argument("config", type=PATH)
@click.option("--out", type=PATH, default=PARAMS_FILE, show_default=True, help="The file to write.")
@click.option("--gpus", type=click.IntRange(min=1), default=1, show_default=True, help="GPUs that share the run.")
def import_config(config: Path, out: Path, gpus: int) -> None:
    """Write the params.yaml of another tool's run.

    CONFIG is a configuration of LLaMA-Factory, Axolotl, TRL, torchtune, LitGPT, Unsloth or ms-swift, whose shell script
    may start `swift sft`. In a project, the comments of its params.yaml stay, and so does its section `run`.
    """
    output_file(out, "--out")
    converted = read_config_of_tool(config, gpus)
    if "model.name" not in converted.values:  # The file of a usual run names one.
        raise UserError(f"{config}: must name a model; add {_model_key(converted)}: a hub id or a directory")
    params = with_flags(load_params(COMMON_PARAMS), converted.flags())
    unchecked = _refuse_other_families(converted, params)
    template = out if out.exists() else COMMON_PARAMS
    load_params(template)  # Refuses a file that is no params.yaml.
    values = params.model_dump()
    unchanged = {"run"} if template == out else set()
    change_params({key: value for key, value in values.items() if key not in unchanged}, template, out)
    echo_text("\n".join(converted.lines()))
    if unchecked is not None:
        echo_text(labelled("  not checked", unchecked))
    source = "" if "data.source" in converted.values else "; set data.source to your rows"
    # Outside of a project there is no pipeline: full rows are predicted, not those of the data.
    in_project = Path("dvc.yaml").exists()
    command = "dvc repro estimate" if in_project else shell_line(["lean-finetune", "fit", "--params", no_option(out)])
    whose = " for your data" if in_project else ""
    echo_text(labelled("", f"{out}: written{source}; `{command}` predicts its memory{whose}", 0))


def _model_key(converted: Converted) -> str:
    """The tool's key for the model."""
    [table] = [table for table in tables() if table["tool"] == converted.tool]
    return next(key for key, rule in table["keys"].items() if rule == "model.name")


def _refuse_other_families(converted: Converted, params: Params) -> str | None:
    """Refuse rows with images for a model that is not trained with them; a note if its config.json is not here.

    Raises:
        UserError: naming the model's family.
    """
    if converted.image is None:
        return None
    try:
        directory = find_model(params.model.name, params.model.revision)
    except UserError:
        return f"whether {params.model.name} is trained with images: its config.json is not here; `fit --image` says so"
    from lean_finetune.model.model_config import read_config  # Here: imports torch.

    read_config(directory, images=True)
    return None
