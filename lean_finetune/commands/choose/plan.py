"""The command `lean-finetune plan`: choose the fastest memory switches that fit, and write them into params.yaml."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from cuda_memory.gpus import gpu_names
from cuda_memory.terminal import echo, echo_json, echo_text
from cuda_memory.units import round_up
from cuda_memory.user_paths import PATH, output_file
from lean_finetune.commands.project.params_file import change_params
from lean_finetune.commands.row_lengths import is_of_quantiles, row_index
from lean_finetune.commands.without_compiler import importing_without_compiler
from lean_finetune.config.field_types import AnyPrecision, Method
from lean_finetune.config.load import COMMON_PARAMS, PARAMS_FILE, load_params, with_flags
from lean_finetune.config.schema import Params
from lean_finetune.core.errors import DoesNotFit, UsageFault, UserError
from lean_finetune.core.file_names import refuse_link_out
from lean_finetune.core.read_yaml import parse_yaml
from lean_finetune.core.stage_command import StageCommand
from lean_finetune.islands.tower import TOWER
from lean_finetune.memory.gpu_names import named_gpu
from lean_finetune.pinning.locate import find_model
from lean_finetune.plan.planner import pad_multiple
from lean_finetune.plan.step_tokens import StepTokens, step_tokens_of, with_step_tokens

if TYPE_CHECKING:
    from lean_finetune.commands.choose.sampled_rows import SampledRows
    from lean_finetune.memory.choice.choose import Chosen

BEST = "best"
ROUNDED_LENGTH = 64
"""data.max_length is a multiple of this: rows slightly longer than those of the sample are not cut."""


@click.command(cls=StageCommand)
@click.option("--model", help="A hub id, a directory, or a config.json. Default: that of the params file.")
@click.option("--data", help="The rows to train: a file, directory, glob or hf://org/name. Default: as for --model.")
@click.option("--gpu", shell_complete=gpu_names, help="A known GPU, a size such as 24GiB, or auto: this machine's.")
@click.option("--gpus", type=click.IntRange(min=1), help="Number of GPUs.")
@click.option(
    "--method",
    type=click.Choice([*get_args(Method), BEST], case_sensitive=False),
    help="What is trained; best: the first of full, lora, qlora that fits. Default: as for --model, or best.",
)
@click.option("--length", type=click.IntRange(min=1), help="Tokens at which rows end. Default: the longest row's.")
@click.option("--lengths", help="The rows' tokens instead of rows: see `fit --lengths`.")
@click.option("--precision", type=click.Choice(get_args(AnyPrecision)), help="Default: auto, by the GPU.")
@click.option("--host-ram", type=click.FloatRange(min=0, min_open=True), help="GiB of the host, for offload.")
@click.option("--set", "-S", "sets", multiple=True, metavar="KEY=VALUE", help="Any parameter; it keeps this value.")
@click.option("--params", type=PATH, help="A params.yaml to start from. Default: ./params.yaml if it exists.")
@click.option("--out", type=PATH, help="The params.yaml to write. Default: the one to start from.")
@click.option("--choice", type=click.IntRange(1, 3), default=1, show_default=True, help="Which of the sets to write.")
@click.option("--dry-run", is_flag=True, help="Write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON with sizes in bytes.")
def plan(
    model: str | None,
    data: str | None,
    gpu: str | None,
    gpus: int | None,
    method: str | None,
    length: int | None,
    lengths: str | None,
    precision: str | None,
    host_ram: float | None,
    sets: tuple[str, ...],
    params: Path | None,
    out: Path | None,
    choice: int,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Choose the fastest memory switches that fit a GPU, for your rows.

    For example: lean-finetune plan --model Qwen/Qwen3-8B --data rows.jsonl --gpu RTX-4090

    Counts the tokens of a sample of the rows, predicts memory and time of many settings without a GPU, prints the best
    three, and writes the first into params.yaml. Exit code: 0 if one fits, 3 if none does, 2 if the command line is
    wrong.
    """
    if data is not None and lengths is not None:
        raise UsageFault("--lengths: stands in for rows; leave out --data or --lengths")
    values = {
        "model.name": model,
        "data.source": data,
        "hardware.gpu": gpu,
        "hardware.num_gpus": gpus,
        "hardware.host_ram_gib": host_ram,
        "train.method": None if method == BEST else method,
        "train.precision": precision,
    }
    refuse_contradictions({**values, "train.method": method, "data.max_length": length}, sets)
    asked = asked_for(values, method, sets, params, None if dry_run else out)
    if out is not None:
        output_file(out, "--out")
    target = None if dry_run else out or (asked.file if asked.file != COMMON_PARAMS else None)
    if target is not None:
        refuse_link_out(target.parent, target)
    with importing_without_compiler():  # Here: imports torch, which --help skips.
        from lean_finetune.commands.choose.plan_text import nothing_fits, plan_json, plan_lines
        from lean_finetune.memory.choice.choose import faster_with_bf16_updates, lighter_that_fits

    rows = rows_of(asked, data, length, lengths)
    chosen, flags, step = chosen_sets(asked, rows, length, rows_known=lengths is None or not is_of_quantiles(lengths))
    if (rows is None or lengths is not None) and TOWER.has_family(chosen.start.run.config.model_type):
        echo(f"note: rows of text are assumed; --data names rows, whose {TOWER.name} are counted", err=True)
    index = None if rows is None else rows.index.shortened(chosen.start.run.params.data.max_length)
    if not chosen.choices:
        fault = DoesNotFit(nothing_fits(chosen, lighter_that_fits(chosen, asked.fixed, index)))
        fault.answer = {**plan_json(chosen, rows, flags, None), "written": None} if as_json else {}
        raise fault
    if choice > len(chosen.choices):
        raise UsageFault(f"--choice: there are {len(chosen.choices)} sets that fit; got {choice}; name one of them")
    picked = {**dict(text.split("=", 1) for text in flags), **chosen.settings(chosen.choices[choice - 1])}
    changed: Mapping[str, Any] | None = None
    if target is not None:
        changed = change_params(nested(picked), target if target.exists() else asked.file, target)
    faster = faster_with_bf16_updates(chosen, asked.fixed, index)
    if as_json:
        echo_json({**plan_json(chosen, rows, flags, faster), "written": str(target) if target else None})
        return
    for line in plan_lines(chosen, rows, None if target is None else choice, step, faster):
        echo_text(line)
    echo("")
    own = load_params(asked.file).model_dump()
    if changed is None:
        changed = {key: parse_yaml(text) for key, text in picked.items() if _value(own, key) != parse_yaml(text)}
        echo("not written; --out FILE writes a params.yaml with" if target is None else "")
    else:
        echo(f"{target}: {'written with' if changed else 'no change'}")
    for key, value in changed.items():
        echo(f"  {key}: {'' if value is None else json.dumps(value)}")


def rows_of(asked: "Asked", data: str | None, length: int | None, lengths: str | None) -> "SampledRows | None":
    """The rows that options of these names give; None for rows of one length, which is given instead.

    Raises UsageFault if they give neither.
    """
    from lean_finetune.commands.choose.sampled_rows import SampledRows, sampled_rows

    if lengths is not None:
        given = row_index(lengths, asked.params, truncates=False)
        count = len(given.lengths) // asked.params.train.row_kind.token_rows
        return SampledRows(index=given, tokenized=count, total=count)
    if data is not None or (length is None and asked.file != COMMON_PARAMS):
        return sampled_rows("--data" if data is not None else "data.source", asked.params)
    if length is None and "data.max_length" not in asked.fixed:
        raise UsageFault("--data: name the rows to train, or the tokens of the longest one by --length")
    return None


def _value(sections: Any, dotted: str) -> Any:
    for key in dotted.split("."):
        sections = sections[key]
    return sections


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the command line asks for."""

    params: Params
    file: Path
    """Where the parameters come from."""
    methods: tuple[Method, ...]
    """To be tried in this order."""
    fixed: frozenset[str]
    """Parameters of --set, which keep their values."""
    flags: tuple[str, ...]
    """Overrides of the command line."""


def refuse_contradictions(options: Mapping[str, Any], sets: Sequence[str]) -> None:
    """Raise UsageFault if --set names a parameter that an option sets, too."""
    for key in (text.partition("=")[0].strip() for text in sets):
        if options.get(key) is not None:
            raise UsageFault(f"{key}: is given by --set and by an option of its own; leave out one of them")


def asked_for(
    values: Mapping[str, Any], method: str | None, sets: Sequence[str], params: Path | None, out: Path | None
) -> Asked:
    """The parameters of a command line; `values` are options by parameter, None where they are not given.

    `out`: the file to write, if it is another than the one to start from.
    """
    file = params or (PARAMS_FILE if PARAMS_FILE.exists() else COMMON_PARAMS)
    p = load_params(file)
    if out is not None and out.exists() and not out.samefile(file):  # Its other values would make another run.
        raise UsageFault(f"--out: {out} exists; name a new file, or start from it by --params {out}")
    if file == COMMON_PARAMS and values["model.name"] is None:
        raise UsageFault(f"--model: name a hub id, a directory or a config.json; there is no {PARAMS_FILE} here")
    flags = [f"{key}={json.dumps(value)}" for key, value in values.items() if value is not None]
    if values["train.precision"] is None:
        flags.append("train.precision=auto")
    gpus = values["hardware.num_gpus"] or p.hardware.num_gpus
    sharding = "none" if gpus == 1 else "ddp" if p.train.sharding == "none" else p.train.sharding
    try:
        flags = [*flags, f"train.sharding={sharding}", *sets]
        p = with_flags(p, [*flags, f"run.progress={json.dumps(sys.stderr.isatty())}"], check=False)
        if p.hardware.gpu.strip().lower() != "auto":
            named_gpu(p.hardware.gpu)
    except UserError as error:
        raise UsageFault(str(error)) from None
    find_model(p.model.name, p.model.revision)  # Wrong names are refused before torch is imported, which takes seconds.
    from lean_finetune.memory.choice.choose import BEST as METHODS

    best = method == BEST or (method is None and file == COMMON_PARAMS)
    fixed = frozenset(text.partition("=")[0].strip() for text in sets)
    methods = METHODS if best and "train.method" not in fixed else (p.train.method,)
    return Asked(params=p, file=file, methods=methods, fixed=fixed, flags=tuple(flags))


def chosen_sets(
    asked: Asked, rows: "SampledRows | None", length: int | None, *, rows_known: bool
) -> "tuple[Chosen, list[str], StepTokens]":
    """The answer, the overrides of the command line with the length of rows, and the tokens of a step.

    `rows_known`: whether `rows` are the user's, and not assumed ones.
    """
    from lean_finetune.memory.choice.choose import choose
    from lean_finetune.memory.devices import resolve_gpu
    from lean_finetune.memory.predict.assumed_images import assumed_of
    from lean_finetune.model.model_config import max_positions
    from lean_finetune.run.assets import Assets

    p, flags = asked.params, list(asked.flags)
    device, _ = resolve_gpu(p.hardware.gpu)
    assets, index = Assets.named(p), None if rows is None else rows.index
    attached = () if index is None else index.attached
    config = assets.config_to_predict(p.train, attached)
    assumed = assumed_of(attached, config, assets.directory, p.data)
    if "data.max_length" not in asked.fixed:
        if length is None:
            longest = p.data.max_length if index is None else round_up(int(index.lengths.max()), ROUNDED_LENGTH)
            length = min(longest, max_positions(config) or longest)
        flags.append(f"data.max_length={length}")
    try:  # The file alone keeps all rules, so the command line breaks them.
        p = with_flags(p, [*flags, f"run.progress={json.dumps(p.run.progress)}"], check=False)
        tokens = max(p.bucket.max_tokens, round_up(p.data.max_length, pad_multiple(p)) * p.train.row_kind.unit)
        p = with_flags(p, [] if "bucket.max_tokens" in asked.fixed else [f"bucket.max_tokens={tokens}"])
    except UserError as error:
        raise UsageFault(str(error)) from None
    if index is not None:
        index = index.shortened(p.data.max_length)
    share = 1.0 if rows is None else rows.trained(p) * p.train.row_kind.token_rows / len(rows.index.lengths)
    step = step_tokens_of(index if rows_known else None, p.train, share=share)
    p = with_step_tokens(p, step)
    p = p.model_copy(update={"train": assets.with_token_ids(p.train)})
    return choose(p, config, device, asked.methods, asked.fixed, index, assumed=assumed), flags, step


def nested(flags: Mapping[str, str]) -> dict[str, Any]:
    """Overrides as sections."""
    values: dict[str, Any] = {}
    for dotted, text in flags.items():
        *sections, key = dotted.split(".")
        section = values
        for name in sections:
            section = section.setdefault(name, {})
        section[key] = parse_yaml(text)
    return values
