"""The view *Snapshot*: what fills a GPU's memory? It runs `lean-finetune snapshot`."""

from functools import partial
from pathlib import Path
from typing import Any

import gradio as gr

from cuda_memory.gpus import GPUS
from cuda_memory.terminal import visible_line
from cuda_memory.units import readable_size
from lean_finetune.core.errors import UserError
from lean_finetune.page.frames import frame
from lean_finetune.page.jobs import run_command, workplace
from lean_finetune.page.limits import Limits
from lean_finetune.page.project.documents import fault_document

NO_GPU = "none"
KINDS = (".pickle", ".pkl", ".csv", ".gz")


def snapshot_view(limits: Limits) -> None:
    """Add the view to the tab that is open."""
    most = readable_size(limits.upload_bytes)
    with gr.Row():
        dropped = gr.File(
            label=f"A file of torch.cuda.memory._dump_snapshot, at most {most}",
            file_count="single",
            height=160,
            elem_id="snapshot-file",
        )
        with gr.Column():
            path = gr.Textbox("", label="Or the file on this machine", visible=not limits.is_hosted)
            gpu = gr.Dropdown(
                [NO_GPU, *(known.name for known in GPUS)],
                value=NO_GPU,
                allow_custom_value=True,
                label="Would it fit this GPU?",
                info="a name, or a size such as 24GiB",
            )
    button = gr.Button("What fills the memory?", variant="primary")
    gr.HTML('<p class="quiet">Nothing in the file is executed, and it is removed after it was read.</p>')
    answer = gr.HTML(elem_id="snapshot-answer")
    gr.on(
        [button.click, path.submit],
        partial(_answer, limits),
        [dropped, path, gpu],
        [answer, dropped],
        concurrency_id="commands",
        concurrency_limit=limits.at_once,
        api_visibility="private",
    )


def _answer(limits: Limits, dropped: str | None, path: str, gpu: str | None) -> tuple[str, Any]:
    """The answer as a frame. The upload is removed."""
    try:
        given = "" if limits.is_hosted else path.strip()
        if dropped is None and not given:
            raise UserError("drop a file first")
        document = snapshot_document(Path(dropped or given), gpu, limits)
    except UserError as error:
        document = fault_document(f"Error: {error}")
    finally:
        if dropped is not None:
            Path(dropped).unlink(missing_ok=True)
    return frame("Answer", document), None


def snapshot_document(file: Path, gpu: str | None, limits: Limits) -> str:
    """The page of `lean-finetune snapshot` about a file.

    Raises:
        UserError: the command says so.
    """
    if gpu is not None and not (gpu.isprintable() and len(gpu) <= 100):
        raise UserError("the GPU must be a name or a size, such as 24GiB")
    with workplace() as place:
        if limits.is_hosted:  # The command opens files of its own directory only.
            file = file.rename(place / file.name)
        words = ["snapshot", f"--html={place / 'answer.html'}", "--json"]
        words += [] if gpu in (None, "", NO_GPU) else [f"--gpu={gpu}"]
        ended = run_command([*words, "--", str(file.absolute())], place, limits)
        if ended.code != 0:
            raise UserError(visible_line(ended.fault.replace(f"{file.absolute().parent}/", "")))
        return (place / "answer.html").read_text(encoding="utf-8")
