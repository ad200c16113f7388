"""The view *Run*: train in the project where the page was started. It runs `lean-finetune run`."""

import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, get_args

import gradio as gr

from cuda_memory.gpus import GPUS
from cuda_memory.page.html import html
from cuda_memory.terminal import visible_line
from lean_finetune.config.field_types import Method
from lean_finetune.core.errors import UserError
from lean_finetune.page.frames import live_frame
from lean_finetune.page.jobs import option_words
from lean_finetune.page.project.project_run import read_state, start_run, stop_run
from lean_finetune.page.project.run_document import Training, run_document
from lean_finetune.page.project.training_curves import LiveCurves, planned_steps, predicted_peak_bytes

SECONDS = 2.0
"""Between two looks at the run."""
SHARED_SECONDS = 1.0
"""For so long all windows are shown the same look."""
AS_IT_IS = "as it is"


def run_view(free_memory: Callable[[], None]) -> None:
    """Add the view to the tab that is open. `free_memory` ends what has loaded a model, before a run."""
    gr.HTML(html('<p class="quiet">The project: {}</p>', str(Path.cwd())))
    with gr.Accordion("Model, rows and parameters", open=False):
        gr.HTML('<p class="quiet">A new project needs a model and rows; empty fields stay as they are.</p>')
        with gr.Row():
            model = gr.Textbox("", label="Model of the run", info="a hub id or a directory")
            data = gr.Textbox("", label="Rows", info="a file, a directory or hf://org/name")
        with gr.Row():
            gpu = gr.Dropdown(
                [AS_IT_IS, "auto", *(known.name for known in GPUS)],
                value=AS_IT_IS,
                allow_custom_value=True,
                label="GPU of the run",
                info="or a size, such as 24GiB",
            )
            method = gr.Dropdown(
                [AS_IT_IS, *get_args(Method)], value=AS_IT_IS, label="Method of the run", info="what is trained"
            )
        sets = gr.Textbox(
            "", label="Parameters of the run", info="KEY=VALUE, one a line", placeholder="train.epochs=3", lines=4
        )
    with gr.Row():
        run = gr.Button("Run", variant="primary", elem_id="run-start")
        stop = gr.Button("Stop", variant="stop", elem_id="run-stop")
    gr.HTML('<p class="quiet">What has changed runs, and a stopped run goes on. It needs no window to stay open.</p>')
    said = gr.HTML(elem_id="run-said")
    shown = gr.HTML(elem_id="run-answer", **live_frame("The run"))
    look = Look()
    quick: Mapping[str, Any] = {"api_visibility": "private", "show_progress": "hidden", "concurrency_limit": None}
    run.click(partial(_start, look, free_memory), [model, data, gpu, method, sets], [said, shown], **quick)
    stop.click(partial(_stop, look), None, [said, shown], **quick)
    gr.Timer(SECONDS).tick(look.document, None, shown, trigger_mode="once", **quick)


class Look:
    """The run as a document, for all windows."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._curves, self._document, self._until = LiveCurves(), "", 0.0

    def document(self) -> str:
        """The run as it is now, or was a moment ago."""
        with self._lock:
            if time.monotonic() > self._until:
                state = read_state()
                steps = self._curves.steps(state.started if state.is_running else 0.0)
                training = Training(
                    steps=steps,
                    written=self._curves.written,
                    peak_bytes=predicted_peak_bytes(),
                    planned_steps=planned_steps(),
                )
                self._document = run_document(state, training)
                self._until = time.monotonic() + SHARED_SECONDS
            return self._document

    def again(self) -> str:
        """The run as it is now."""
        self._until = 0.0
        return self.document()


def _start(
    look: Look,
    free_memory: Callable[[], None],
    model: str,
    data: str,
    gpu: str | None,
    method: str | None,
    sets: str,
) -> tuple[str, str]:
    given = {"model": model, "data": data, "gpu": gpu, "method": method}
    options = {name: "" if value in (None, AS_IT_IS) else str(value).strip() for name, value in given.items()}

    def start() -> None:
        words = option_words(options, sets)
        free_memory()
        start_run(words)

    return _done(look, start)


def _stop(look: Look) -> tuple[str, str]:
    return _done(look, stop_run)


def _done(look: Look, act: Callable[[], None]) -> tuple[str, str]:
    """What to say of a button, and the run."""
    try:
        act()
    except UserError as error:
        return html('<p role="alert" class="refusal">Error: {}</p>', visible_line(str(error))), look.again()
    return "", look.again()
