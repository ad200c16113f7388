"""The view *Experiments*: those of the project where the page was started, side by side. It runs `compare`."""

from functools import partial
from pathlib import Path

import gradio as gr

from cuda_memory.page.html import html
from lean_finetune.core.errors import UserError
from lean_finetune.page.frames import frame
from lean_finetune.page.jobs import run_command, workplace
from lean_finetune.page.limits import Limits
from lean_finetune.page.project.documents import fault_document

REPORT = Path("data/report/report.html")
MOST_REPORT_BYTES = 32 << 20


def experiments_view(limits: Limits) -> None:
    """Add the view to the tab that is open."""
    button = gr.Button("Compare", variant="primary")
    place = html('<p class="quiet">The project: {}</p>', str(Path.cwd()))
    gr.HTML(place)
    answer = gr.HTML(elem_id="experiments-answer")
    gr.HTML("<h2>Report of the last run here</h2>")
    report = gr.HTML(elem_id="report-answer")
    button.click(
        partial(_answer, limits),
        None,
        [answer, report],
        concurrency_id="commands",
        concurrency_limit=limits.at_once,
        api_visibility="private",
    )


def _answer(limits: Limits) -> tuple[str, str]:
    """The table and the report, as frames."""
    found = []
    for read in (partial(_compared, limits), last_report):
        try:
            found.append(read())
        except UserError as error:
            found.append(fault_document(str(error)))
    return frame("Experiments", found[0]), frame("Report", found[1])


def _compared(limits: Limits) -> str:
    """The page of `lean-finetune compare`.

    Raises:
        UserError: the command says so.
    """
    with workplace() as place:
        ended = run_command(["compare", f"--html={place / 'answer.html'}", "--json"], place, limits)
        if ended.code != 0:
            raise UserError(ended.fault)
        return (place / "answer.html").read_text(encoding="utf-8")


def last_report() -> str:
    """The report in this directory.

    Raises:
        UserError: there is none, or it is too large.
    """
    try:
        with REPORT.open("rb") as file:
            content = file.read(MOST_REPORT_BYTES + 1)
    except OSError as error:
        raise UserError(f"{REPORT}: cannot be read ({error.strerror}); `lean-finetune run` writes it") from None
    if len(content) > MOST_REPORT_BYTES:
        raise UserError(f"{REPORT}: is larger than {MOST_REPORT_BYTES} bytes; open it in a window of its own")
    return content.decode("utf-8", errors="replace")
