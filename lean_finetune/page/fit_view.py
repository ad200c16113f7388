"""The view *Fit*: does a run fit a GPU? It runs `lean-finetune fit`."""

import json
import re
import shlex
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, get_args

import gradio as gr

from cuda_memory.gpus import GPUS
from lean_finetune.config.field_types import Method
from lean_finetune.core.errors import UserError
from lean_finetune.core.read_yaml import MOST_BYTES
from lean_finetune.page.fit_answer import fit_document
from lean_finetune.page.frames import frame
from lean_finetune.page.jobs import option_words, run_command, workplace
from lean_finetune.page.limits import Limits
from lean_finetune.page.project.documents import fault_document

SHIPPED = sorted(path.name for path in (Path(__file__).parents[1] / "example_configs").iterdir())
HUB_ID = re.compile(r"(?!.*\.\.)[\w-][\w.-]{0,95}(/[\w-][\w.-]{0,95})?", re.ASCII)
USUAL = "usual"
NO_DATA = "rows.jsonl"
"""Where the command to copy needs the user's own rows."""


def fit_view(limits: Limits) -> None:
    """Add the view to the tab that is open."""
    with gr.Row():
        model = gr.Dropdown(
            SHIPPED,
            value="llama-3.1-8b",
            allow_custom_value=True,
            label="Model",
            info="a hub id" if limits.is_hosted else "a hub id, a directory or a config.json",
        )
        gpu = gr.Dropdown(
            [known.name for known in GPUS],
            value="RTX-4090",
            allow_custom_value=True,
            label="GPU",
            info="or a size, such as 24GiB",
        )
        gpus = gr.Textbox("", label="Number of GPUs", info="usually 1; several share the state", placeholder="1")
    method = gr.Radio([USUAL, *get_args(Method)], value=USUAL, label="Method", info="of training; usually qlora")
    with gr.Row():
        length = gr.Textbox("", label="Longest row", info="in tokens", placeholder="4096")
        image = gr.Textbox("", label="Images in rows", info="width x height", placeholder="1280x960")
        per_row = gr.Textbox("", label="Images per row", info="if there are any", placeholder="1")
    with gr.Accordion("Other parameters, or the configuration of another tool", open=False):
        with gr.Row():
            sets = gr.Textbox(
                "", label="Parameters", info="KEY=VALUE, one a line", placeholder="train.lora.rank=64", lines=8
            )
            config = gr.Textbox(
                "",
                label="YAML of LLaMA-Factory, Axolotl, TRL, torchtune, LitGPT, ms-swift or Unsloth",
                info="the model is then the configuration's, and so is the rest that is not set above",
                lines=8,
                max_length=MOST_BYTES,
            )
    button = gr.Button("Does it fit?", variant="primary")
    gr.HTML('<p class="quiet">It takes 10 to 60 s. No weights, data or GPU are needed.</p>')
    answer = gr.HTML(elem_id="fit-answer")
    command = gr.Textbox(
        label="The same in a terminal, and the run", lines=2, buttons=["copy"], interactive=False, visible=False
    )
    inputs = [model, gpu, gpus, method, length, image, per_row, sets, config]
    gr.on(
        [button.click, *(field.submit for field in (gpus, length, image, per_row))],
        partial(_answer, limits),
        inputs,
        [answer, command],
        concurrency_id="commands",
        concurrency_limit=limits.at_once,
        api_visibility="private",
    )


def _answer(limits: Limits, *values: Any) -> tuple[str, dict[str, Any]]:
    """The answer to the form, as a frame, and the commands."""
    names = ("model", "gpu", "gpus", "method", "length", "image", "per_row", "sets", "config")
    try:
        document, commands = fit_answer(dict(zip(names, values, strict=True)), limits)
    except UserError as error:
        document, commands = fault_document(f"Error: {error}"), ""
    return frame("Answer", document), gr.update(value=commands, visible=bool(commands))


def fit_answer(form: Mapping[str, Any], limits: Limits) -> tuple[str, str]:
    """The document and the commands for the values of the form.

    Raises:
        UserError: a field is wrong, or the command says so.
    """
    text = form["config"] or ""
    if len(text.encode(errors="replace")) > MOST_BYTES:
        raise UserError(f"the configuration must have at most {MOST_BYTES} bytes; shorten it")
    has_config = bool(text.strip())
    words = fit_words(form, limits, has_config=has_config)
    with workplace() as place:
        of_config = []
        if has_config:
            (place / "config.yaml").write_text(text, encoding="utf-8", errors="replace")
            of_config = [f"--from={place / 'config.yaml'}"]
        ended = run_command([*words, *of_config, "--json"], place, limits)
    answer = json.loads(ended.out) if ended.code in (0, 3) and ended.out else {}
    if "would_fit" not in answer:
        raise UserError(ended.fault)
    shown = [*words, "--from=config.yaml"] if has_config else words
    return fit_document(answer, shown), _commands(answer, shown, form, has_config=has_config)


def fit_words(form: Mapping[str, Any], limits: Limits, *, has_config: bool) -> list[str]:
    """The words of the command for the fields; of another tool's configuration, without the model.

    Raises:
        UserError: a field is too long, or names a file of a hosted page.
    """
    given = {
        name: (form[name] or "").strip() for name in ("model", "gpu", "gpus", "method", "length", "image", "per_row")
    }
    model = given["model"]
    if limits.is_hosted and not has_config and model not in SHIPPED and not HUB_ID.fullmatch(model):
        raise UserError("the model must be one of the list or a hub id, such as Qwen/Qwen3-8B")
    options = {
        "model": "" if has_config else model,
        "gpu": given["gpu"],
        "gpus": given["gpus"],
        "method": "" if given["method"] == USUAL else given["method"],
        "length": given["length"],
        "image": given["image"],
        "images-per-row": given["per_row"],
    }
    return ["fit", *option_words(options, form["sets"])]


def _commands(answer: Mapping[str, Any], words: list[str], form: Mapping[str, Any], *, has_config: bool) -> str:
    """The command of this answer, and the one that starts the run, with the first settings that fit."""
    lines = [shlex.join(["lean-finetune", *words])]
    offer = next(iter(answer["would_fit"]), None)
    if not has_config and (answer["verdict"] == "fits" or offer is not None):
        run = [word for word in words[1:] if word.startswith(("--model=", "--gpu=", "--method=", "--set="))]
        more = [f"--set={flag}" for flag in (offer or {"settings": []})["settings"]]
        if length := (form["length"] or "").strip():
            more.append(f"--set=data.max_length={length}")
        lines.append(shlex.join(["lean-finetune", "run", "my-run", f"--data={NO_DATA}", *run, *more]))
    return "\n".join(lines)
