"""The command `lean-finetune fit`: its options, and the parameters that they mean."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, get_args

import click

from cuda_memory.gpus import GPUS, gpu_names
from cuda_memory.terminal import echo, echo_json, echo_text
from cuda_memory.units import GIB, labelled, round_up
from cuda_memory.user_paths import PATH, shell_line
from lean_finetune.commands.fit_apply import apply_offer, check_target
from lean_finetune.commands.fit_images import NUMBER_IN_A_ROW, SIZE_OF_EACH, Images, asked_images, assumed_rows
from lean_finetune.commands.row_lengths import is_of_quantiles, row_index
from lean_finetune.commands.without_compiler import importing_without_compiler
from lean_finetune.config.field_types import AnyPrecision, Method
from lean_finetune.config.load import COMMON_PARAMS, PARAMS_FILE, load_params, with_flags
from lean_finetune.config.schema import Params
from lean_finetune.core.errors import DoesNotFit, UsageFault, UserError
from lean_finetune.core.stage_command import StageCommand
from lean_finetune.memory.gpu_names import named_gpu
from lean_finetune.pinning.locate import find_model
from lean_finetune.plan.planner import pad_multiple
from lean_finetune.plan.step_tokens import step_tokens_of, with_step_tokens

if TYPE_CHECKING:
    from lean_finetune.commands.convert.conversions import Converted
    from lean_finetune.memory.advice.length_staircase import Staircase
    from lean_finetune.memory.advice.plan_memory import PlanMemory
    from lean_finetune.memory.advice.run import Run
    from lean_finetune.memory.predict.peak import Prediction

    Predicted = tuple[Run, Prediction, PlanMemory | None, Staircase | None]

MOST_TOKENS = 2**26
"""Tokens of a micro-batch: more than any GPU holds, and few enough to list their rows."""


@click.command(cls=StageCommand)
@click.option(
    "--model",
    help="A hub id (only its config.json is fetched), a directory, a config.json, or a shipped one: llama-3.1-8b.",
)
@click.option("--gpu", shell_complete=gpu_names, help="A known GPU, a size such as 24GiB, or auto: this machine's.")
@click.option("--gpus", type=click.IntRange(min=1), help="Number of GPUs; they use zero3 unless --set says else.")
@click.option(
    "--method", type=click.Choice(get_args(Method), case_sensitive=False), help="What is trained. Default: qlora."
)
@click.option("--length", type=click.IntRange(min=1), help="Tokens of the longest row. Default: 4096.")
@click.option(
    "--precision", type=click.Choice(get_args(AnyPrecision)), help="Default: auto (bf16, or fp16 on old GPUs)."
)
@click.option("--set", "-S", "sets", multiple=True, metavar="KEY=VALUE", help="Any parameter: train.lora.rank=64.")
@click.option("--params", type=PATH, help="A params.yaml to start from. Default: ./params.yaml if there is no --model.")
@click.option(
    "--from",
    "config",
    type=PATH,
    help="A configuration of LLaMA-Factory, Axolotl, TRL, torchtune, LitGPT, ms-swift or Unsloth, or their script.",
)
@click.option("--keys", is_flag=True, help="With --from: what becomes of each key of the configuration here.")
@SIZE_OF_EACH
@NUMBER_IN_A_ROW
@click.option("--lengths", help="The rows: a file of rows or of lengths, or p50=400,p99=3000,max=4096.")
@click.option("--verdict", "verdict_alone", is_flag=True, help="Print the verdict alone: for scripts.")
@click.option(
    "--apply",
    "offer",
    type=click.IntRange(min=1),
    is_flag=False,
    flag_value=1,
    metavar="[N]",
    help="Write the Nth of the settings that would fit, or the first, into the params file.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON with sizes in bytes.")
@click.option("--list-gpus", is_flag=True, help="List the known GPUs and exit.")
def fit(
    model: str | None,
    gpu: str | None,
    gpus: int | None,
    method: str | None,
    length: int | None,
    precision: str | None,
    sets: tuple[str, ...],
    params: Path | None,
    config: Path | None,
    keys: bool,
    size: str | None,
    per_row: int | None,
    lengths: str | None,
    verdict_alone: bool,
    offer: int | None,
    as_json: bool,
    list_gpus: bool,
) -> None:
    """Predict whether fine-tuning fits a GPU. Needs no weights, data or GPU.

    For example: lean-finetune fit --model Qwen/Qwen3-8B --gpu RTX-4090

    Prints the verdict, the peak memory of each phase, settings that fit if the run does not, the smallest GPU for the
    run, the longest row and the largest micro-batch. Exit code: 0 if the run fits, 3 if it does not, 2 if the command
    line is wrong.
    """
    if list_gpus:
        echo_text("\n".join(_known_gpus()))
        return
    if keys and config is None:
        raise UsageFault("--keys: shows what becomes of a configuration's keys; name it with --from")
    if offer is not None and (verdict_alone or as_json):
        raise UsageFault("--apply: prints what it changes; leave out --json and --verdict")
    values = {"model.name": model, "hardware.gpu": gpu, "train.method": method, "train.precision": precision}
    asked = _asked_run(values, gpus, length, sets, params, config, applies=offer is not None)
    p, flags, converted = asked.params, asked.flags, asked.converted
    shown = asked_images(size, per_row, lengths, converted)
    find_model(p.model.name, p.model.revision)  # Wrong names are refused before torch is imported, which takes seconds.
    with importing_without_compiler():  # Here: imports torch, which --help skips.
        from lean_finetune.commands.fit_text import fit_json, verdict_json, verdict_text
        from lean_finetune.commands.fit_tool import converted_json, tool_json

    given = any(flag.startswith("data.max_length=") for flag in [*asked.of_config, *sets])
    shorten = asked.usual and length is None and not given
    predict = partial(
        _predicted,
        sets=sets,
        lengths=lengths,
        shown=shown,
        shorten=shorten,
        usual=asked.usual and converted is None,
    )
    run, prediction, memory, stairs = predict(p) if converted is None else _of_config(predict, p, converted, flags)
    if verdict_alone:
        figures = (run, prediction, memory)
        if as_json:
            echo_json(verdict_json(*figures))
        else:
            echo(f"verdict {verdict_text(*figures)}")
        _end(*figures)
    if offer is not None:
        for text in _applied(run, prediction, memory, offer, asked.file, flags):
            echo_text(text)
        return
    run_of = partial(_converted_run, run, load_params(asked.file), flags, lengths is not None)
    if as_json:
        answer = fit_json(run, prediction, memory)
        answer["staircase"] = stairs and stairs.as_json()
        answer["from"] = converted and converted_json(converted)
        if converted is not None and config is not None:
            answer["as_tool"] = tool_json(run, converted, config, run_of)
        echo_json(answer)
        _end(run, prediction, memory)
    for text in _lines(asked, (run, prediction, memory, stairs), config, run_of, keys=keys):
        echo_text(text)
    _end(run, prediction, memory)


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What the command line asks for."""

    params: Params
    file: Path
    """Where the parameters come from."""
    flags: list[str]
    """Overrides of the command line."""
    of_config: list[str]
    """Overrides of another tool's configuration."""
    converted: "Converted | None"
    usual: bool
    """The parameters are those of a usual run."""


def _asked_run(
    values: Mapping[str, str | None],
    gpus: int | None,
    length: int | None,
    sets: Sequence[str],
    params: Path | None,
    config: Path | None,
    *,
    applies: bool,
) -> _Asked:
    """The parameters of a command line; `values` are options by parameter, None where they are not given."""
    converted = None
    if config is not None:  # Here: most runs read no other tool's file.
        from lean_finetune.commands.convert.read_config import read_config_of_tool

        converted = read_config_of_tool(config, gpus or 1, with_data=False)
    model = values["model.name"]
    usual = params is None and (model is not None or converted is not None or not PARAMS_FILE.exists())
    if applies:
        check_target(params or PARAMS_FILE, usual=usual)
    file = COMMON_PARAMS if usual else params or PARAMS_FILE
    p = load_params(file)
    if usual and model is None and "model.name" not in (converted.values if converted else {}):
        why = f"{config} names no model" if converted else f"there is no {PARAMS_FILE} here"
        raise UsageFault(f"--model: name a hub id, a directory or a config.json; {why}")
    flags = [f"{key}={json.dumps(value)}" for key, value in values.items() if value is not None]
    flags += _length_flags(p, length, usual=usual and converted is None)
    of_config = converted.flags() if converted else []
    if converted is not None:  # Values of the command line that are wrong in themselves; the rest may be the file's.
        with _usage_faults(True):
            named = with_flags(p, [*flags, *sets], check=False).hardware.gpu.strip()
            if named.lower() != "auto":
                named_gpu(named)
    with _usage_faults(bool(flags or sets) and converted is None):
        flags += [*gpu_flags(p, gpus, [*of_config, *flags, *sets]), *sets]
        p = with_flags(p, [*of_config, *flags, f"run.progress={json.dumps(sys.stderr.isatty())}"])
        if p.hardware.gpu.strip().lower() != "auto":
            named_gpu(p.hardware.gpu)
    if p.bucket.max_tokens > MOST_TOKENS:
        raise UsageFault(
            f"bucket.max_tokens: must be at most {MOST_TOKENS} for a prediction; got {p.bucket.max_tokens}; lower the "
            "micro-batch"
        )
    return _Asked(params=p, file=file, flags=flags, of_config=of_config, converted=converted, usual=usual)


def _predicted(
    p: Params, *, sets: Sequence[str], lengths: str | None, shown: Images | None, shorten: bool, usual: bool
) -> "Predicted":
    """The run, its peaks, what it reserves, and step by step with --lengths.

    `shorten`: the longest row decides data.max_length, up to the model's positions. `usual` as for `_length_flags`.
    """
    from lean_finetune.memory.advice.full_rows import fit_run
    from lean_finetune.memory.advice.verdict import predict_tiers

    if lengths is None:
        run = fit_run(p, shorten=shorten, assumed=assumed_rows(shown))
        return run, *predict_tiers(run), None
    from lean_finetune.memory.advice.length_staircase import predict_staircase, with_rows

    with _usage_faults(True):
        index = row_index(lengths, p, truncates=not shorten)
        if shorten:
            p = with_flags(p, [*_length_flags(p, int(index.lengths.max()), usual=usual), *sets])
        if not is_of_quantiles(lengths):
            p = with_step_tokens(p, step_tokens_of(index.shortened(p.data.max_length), p.train))
        run = with_rows(fit_run(p, shorten=shorten), index)
    prediction, stairs = predict_staircase(run)
    return replace(run, steps=prediction.steps_of_peak), prediction, stairs.memory, stairs


def _lines(
    asked: _Asked, predicted: "Predicted", config: Path | None, run_of: "Callable[[Converted], Run]", *, keys: bool
) -> Iterator[str]:
    """The answer for people: of another tool's configuration first the run there, and with `keys` its keys at last."""
    from lean_finetune.commands.fit_text import fit_lines
    from lean_finetune.commands.fit_tool import tool_lines
    from lean_finetune.memory.advice.verdict import judge_run

    run, prediction, memory, stairs = predicted
    converted = asked.converted
    source = str(config or asked.file) if config or not asked.usual else "the defaults; --set KEY=VALUE changes them"
    words, option = _this_command(), "--set"
    if asked.file == PARAMS_FILE:
        words, option = ["dvc", "exp", "run", *(word for flag in asked.flags for word in ("-S", flag))], "-S"
    if converted is not None and config is not None:
        here = judge_run(run, prediction, memory).state
        yield from tool_lines(run, here, prediction.peak.bytes, converted, config, run_of)
        yield ""
    command, of_tool = shell_line(words), converted is not None
    yield from fit_lines(run, prediction, memory, source, command, option, of_tool=of_tool, stairs=stairs)
    if converted is not None:
        yield ""
        yield from converted.lines() if keys else [labelled("keys", converted.summary())]


def _applied(
    run: "Run", prediction: "Prediction", memory: "PlanMemory | None", offer: int, file: Path, flags: Sequence[str]
) -> Iterator[str]:
    """Apply an offer to the params file; what changes, line by line."""
    from lean_finetune.commands.fit_text import offers_of, verdict_text
    from lean_finetune.memory.advice.verdict import judge_run

    if judge_run(run, prediction, memory).fits:
        raise UserError(f"--apply: nothing to apply: the run {verdict_text(run, prediction, memory)}")
    yield from apply_offer(file, offer, offers_of(run, prediction, memory), flags)


def _converted_run(run: "Run", p: Params, flags: Sequence[str], of_lengths: bool, converted: "Converted") -> "Run":
    """The run of another configuration of the same model and device, with the options of the command line.

    Raises:
        UserError: it is no run here, or has other micro-batches than those that were planned for --lengths.
    """
    from lean_finetune.commands.convert.suited import suit_to_model
    from lean_finetune.memory.advice.full_rows import remade

    suit_to_model(converted, run.config)
    changed = remade(run, with_flags(p, [*converted.flags(), *flags]))
    if not of_lengths:
        return changed
    if changed.bucket.max_tokens != run.bucket.max_tokens or changed.longest != run.longest:
        raise UserError("bucket.max_tokens: --lengths plans the rows of one size of micro-batch; leave it out")
    return replace(changed, steps=run.steps)


def _of_config(
    predict: "Callable[[Params], Predicted]", p: Params, converted: "Converted", others: Sequence[str]
) -> "Predicted":
    """The prediction for a configuration that is suited to its model; the command line's `others` stay."""
    from lean_finetune.commands.convert.suited import pad_rows, suit_to_model
    from lean_finetune.model.model_config import RowsSeeEachOther
    from lean_finetune.run.assets import Assets

    def changed(suit: Callable[[], None]) -> Params:
        before = dict(converted.values)
        suit()
        new = [f"{key}={json.dumps(value)}" for key, value in converted.values.items() if before[key] != value]
        return with_flags(p, [*new, *others]) if new else p

    p = changed(lambda: suit_to_model(converted, Assets.named(p).config_to_predict(p.train)))
    try:
        return predict(p)
    except RowsSeeEachOther:  # A trace shows it, and no config.json does.
        if (padded := changed(lambda: pad_rows(converted))) == p:
            raise
        return predict(padded)


def _end(run: "Run", prediction: "Prediction", memory: "PlanMemory | None") -> NoReturn:
    """End with the exit code of the verdict."""
    from lean_finetune.memory.advice.verdict import judge_run

    sys.exit(0 if judge_run(run, prediction, memory).fits else DoesNotFit.exit_code)


@contextmanager
def _usage_faults(given: bool) -> Iterator[None]:
    """Make errors inside those of the command line, if options are `given`."""
    try:
        yield
    except UserError as error:
        raise UsageFault(str(error), *error.details) if given else error from None


def _length_flags(p: Params, length: int | None, *, usual: bool) -> list[str]:
    """Flags of --length. A micro-batch of the usual run is one row or pair of it; others have at least room for one."""
    if length is None:
        return []
    padded = round_up(length, pad_multiple(p)) * p.train.row_kind.unit
    room = [f"bucket.max_tokens={padded}"] if usual or padded > p.bucket.max_tokens else []
    return [f"data.max_length={length}", *room]


def gpu_flags(p: Params, gpus: int | None, others: Sequence[str]) -> list[str]:
    """Flags of --gpus: GPUs without tensor or pipeline parallelism store a shard unless `others` say otherwise."""
    if gpus is None:
        return []
    p = with_flags(p, [*others, f"hardware.num_gpus={gpus}"], check=False)
    sharding = p.train.sharding
    if p.layout.sharing <= 1:
        sharding = "none"
    elif sharding == "none":  # bitsandbytes cannot split 8-bit weights.
        sharding = "ddp" if p.train.method == "int8_lora" else "zero3"
    return [f"hardware.num_gpus={gpus}", f"train.sharding={sharding}"]


def _this_command() -> list[str]:
    """The words of this command as the user gave them."""
    context = click.get_current_context()
    words = ["lean-finetune", "fit"]
    for option in context.command.params:
        value = context.params[option.name or ""]
        for each in value if isinstance(value, tuple) else () if value is None else (value,):
            words += [option.opts[0]] if each is True else [option.opts[0], str(each)] if each is not False else []
    return words


def _known_gpus() -> Iterator[str]:
    """The table of known GPUs."""
    yield f"{'name':<18}{'memory GiB':>11}{'bf16':>6}{'compute capability':>20}"
    for known in GPUS:
        bf16 = "yes" if known.native_bf16 else "no"
        capability = ".".join(map(str, known.compute_capability))
        yield f"{known.name:<18}{known.memory_bytes / GIB:>11.2f}{bf16:>6}{capability:>20}"
