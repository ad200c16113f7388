"""The command `lean-finetune import`: the params.yaml of a run that another tool's configuration describes."""

from pathlib import Path

import click

from cuda_memory.terminal import echo_text
from cuda_memory.units import labelled
from cuda_memory.user_paths import PATH, no_option, output_file, shell_line
from lean_finetune.commands.convert.conversions import Converted
from lean_finetune.commands.convert.read_config import read_config_of_tool
from lean_finetune.commands.project.params_file import change_params
from lean_finetune.config.load import COMMON_PARAMS, PARAMS_FILE, load_params, with_flags
from lean_finetune.config.other_tools import tables
from lean_finetune.config.schema import Params
from lean_finetune.core.atomic_files import write_text
from lean_finetune.core.errors import UserError
from lean_finetune.core.stage_command import StageCommand
from lean_finetune.pinning.locate import CHAT_TEMPLATE, find_model


@click.command("import", cls=StageCommand)
@click.argument("config", type=PATH)
@click.option("--out", type=PATH, default=PARAMS_FILE, show_default=True, help="The file to write.")
@click.option("--gpus", type=click.IntRange(min=1), default=1, show_default=True, help="GPUs that share the run.")
def import_config(config: Path, out: Path, gpus: int) -> None:
    """Write the params.yaml of another tool's run.

    CONFIG is a configuration of LLaMA-Factory, Axolotl, TRL, torchtune, LitGPT, Unsloth or ms-swift, whose shell script
    may start `swift sft`, or a notebook or Python script of Unsloth or TRL. In a project, the comments of its
    params.yaml stay, and so does its section `run`.
    """
    output_file(out, "--out")
    converted = read_config_of_tool(config, gpus)
    if "model.name" not in converted.values:  # The file of a usual run names one.
        raise UserError(f"{config}: must name a model; add {_model_key(converted)}: a hub id or a directory")
    template_file = _template_file(converted, out)
    params = with_flags(load_params(COMMON_PARAMS), converted.flags())
    unchecked = _refuse_other_families(converted, params)
    template = out if out.exists() else COMMON_PARAMS
    load_params(template)  # Refuses a file that is no params.yaml.
    values = params.model_dump()
    unchanged = {"run"} if template == out else set()
    if template_file is not None:
        write_text(template_file, converted.template_text)
    change_params({key: value for key, value in values.items() if key not in unchanged}, template, out)
    echo_text("\n".join(converted.lines()))
    if template_file is not None:
        echo_text(labelled("  written", f"{template_file}: the chat template of {config}"))
    if unchecked is not None:
        echo_text(labelled("  not checked", unchecked))
    source = "" if "data.source" in converted.values else "; set data.source to your rows"
    # Outside of a project there is no pipeline: full rows are predicted, not those of the data.
    in_project = Path("dvc.yaml").exists()
    command = "dvc repro estimate" if in_project else shell_line(["lean-finetune", "fit", "--params", no_option(out)])
    whose = " for your data" if in_project else ""
    echo_text(labelled("", f"{out}: written{source}; `{command}` predicts its memory{whose}", 0))


def _template_file(converted: Converted, out: Path) -> Path | None:
    """The file beside params.yaml for a template whose text stands in the configuration; None without one.

    Raises:
        UserError: there is another file of that name.
    """
    if not converted.template_text:
        return None
    file = out.parent / CHAT_TEMPLATE
    output_file(file, "chat_template_jinja")
    if file.exists() and file.read_bytes() != converted.template_text.encode():
        raise UserError(f"chat_template_jinja: {file} exists and has another text; move it, or remove it")
    converted.values["data.chat_template"] = CHAT_TEMPLATE  # In the directory of params.yaml.
    return file


def _model_key(converted: Converted) -> str:
    """The tool's key for the model."""
    table = next(table for table in tables() if table["tool"] == converted.tool)
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

    read_config(directory, whole=True)
    return None
