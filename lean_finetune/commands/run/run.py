"""The command `lean-finetune run`: from rows to a trained model and its report, and again after each change."""

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import click

from cuda_memory.gpus import gpu_names
from cuda_memory.terminal import echo_text, json_text
from cuda_memory.units import readable_size
from cuda_memory.user_paths import PATH, text_path
from lean_finetune.commands.choose.plan import nested, refuse_contradictions
from lean_finetune.commands.project.create import Choices
from lean_finetune.commands.run.place import changed_project, commit_first, is_project, made_project, refuse_place
from lean_finetune.commands.run.shown import Shown
from lean_finetune.config.field_types import Method
from lean_finetune.config.load import COMMON_PARAMS, PARAMS_FILE, load_params, with_flags
from lean_finetune.core.errors import UsageFault, UserError
from lean_finetune.core.stage_command import StageCommand


class RunCommand(StageCommand):
    """With --json, an error of the command itself is the last event."""

    def echo_report(self, error: Mapping[str, Any]) -> None:
        """See the base class."""
        echo_text(json_text({"event": "error", **error}))


@click.command(cls=RunCommand)
@click.argument("directory", default=".", type=PATH)
@click.option("--model", help="A directory, or a hub id such as Qwen/Qwen3-8B.")
@click.option("--data", help="Your rows: a file, a glob, a directory or hf://org/name.")
@click.option("--gpu", shell_complete=gpu_names, help="A known GPU, a size such as 24GiB, or auto: this machine's.")
@click.option("--method", type=click.Choice(get_args(Method), case_sensitive=False), help="What is trained.")
@click.option("--set", "-S", "sets", multiple=True, metavar="KEY=VALUE", help="Any parameter of params.yaml.")
@click.option("--json", "as_json", is_flag=True, help="Print events as JSON lines.")
def run(directory: Path, sets: tuple[str, ...], as_json: bool, **options: str | None) -> None:
    """Train in DIRECTORY, by default this one: make a project if there is none, plan it, and run what has changed.

    For example: lean-finetune run my-run --model Qwen/Qwen3-8B --data rows.jsonl --gpu RTX-4090

    Without --model and --data, a new project trains a tiny model on a small sample in a few minutes. If it is
    stopped, the same command goes on. Exit code: that of the stage that failed; 3 if nothing fits.
    """
    place, shell = Path(os.path.abspath(text_path(directory, "DIRECTORY"))), Path.cwd()
    options = _by_parameter(options)
    refuse_contradictions(options, sets)
    exists = is_project(place)
    values = _values(sets, place / PARAMS_FILE if exists else COMMON_PARAMS)
    choices = Choices(
        model=options["model.name"],
        data=options["data.source"],
        gpu=options["hardware.gpu"],
        method=options["train.method"],
        sets=values,
    )
    if not exists:
        refuse_place(directory, named=str(directory) != "." or choices.model is not None or choices.data is not None)
    given = [*(key for key, value in options.items() if value is not None), *_keys(sets)]
    with Shown(as_json=as_json) as shown:
        with (changed_project if exists else made_project)(directory, choices, shown), contextlib.chdir(place):
            _plan_if_needed(sets, given, shown)
        with contextlib.chdir(place):
            _run_pipeline(directory, shown, elsewhere=place != shell)


def _by_parameter(options: dict[str, str | None]) -> dict[str, str | None]:
    names = {"model": "model.name", "data": "data.source", "gpu": "hardware.gpu", "method": "train.method"}
    return {names[key]: value for key, value in options.items()}


def _keys(sets: Sequence[str]) -> list[str]:
    return [text.partition("=")[0].strip() for text in sets]


def _values(sets: Sequence[str], params: Path) -> dict[str, Any]:
    """The values of --set by section. Raises UsageFault for an unknown parameter or a wrong value."""
    try:
        with_flags(load_params(params), sets, check=False)
    except UserError as error:
        raise UsageFault(f"--set: {error}") from None
    return nested(dict(zip(_keys(sets), (text.partition("=")[2] for text in sets), strict=True)))


def _plan_if_needed(sets: Sequence[str], given: Sequence[str], shown: Shown) -> None:
    """Plan the project in the working directory if nobody has planned or run it."""
    from lean_finetune.commands.choose.plan_project import is_unplanned, plan_project

    if Path("dvc.lock").exists() or not is_unplanned(given):
        return
    shown.event("planning", "plan: looks for the fastest switches that fit your rows (`lean-finetune plan`)")
    planned = plan_project(sets)
    peak, usable = readable_size(planned.peak_bytes), readable_size(planned.usable_bytes)
    shown.event(
        "plan",
        f"plan: {planned.words}",
        f"plan: peak of tensors {peak} of {usable} usable on {planned.device}; written into {PARAMS_FILE}",
        **asdict(planned),
    )


def _run_pipeline(directory: Path, shown: Shown, *, elsewhere: bool) -> None:
    """Run the stages in the working directory, and print what they came to."""
    from lean_finetune.commands.run.outcome import REPORT, outcome_lines, read_outcome
    from lean_finetune.commands.run.pipeline import StageFailed, run_pipeline

    try:
        ran = run_pipeline(shown)
    except StageFailed as failed:
        error, details = (failed.lines[0], failed.lines[1:]) if failed.lines else (None, [])
        shown.event("failed", stage=failed.stage, exit_code=failed.exit_code, error=error, details=details)
        raise SystemExit(failed.exit_code) from None
    if set(ran) <= {"pin_code"}:
        shown.event("up_to_date", "nothing has changed since the last run")
    commit_first(shown)
    found = read_outcome()
    lines = outcome_lines(found, directory, elsewhere=elsewhere)
    shown.event("end", *lines, report=str(directory / REPORT), **asdict(found))
