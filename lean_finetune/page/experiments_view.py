"""The view *Experiments*: those of the project where the page was started, side by side. It runs `compare`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gradio as gr

from cuda_memory.page.html import Html, Table, document, html, joined, table
from lean_finetune.core.errors import UserError
from lean_finetune.page.frames import frame
from lean_finetune.page.jobs import run_command, workplace
from lean_finetune.page.limits import Limits
from lean_finetune.page.project.documents import STYLE, fault_document

REPORT = Path("data/report/report.html")
MOST_REPORT_BYTES = 32 << 20
TITLES = {
    "state": "state",
    "peak_gib_predicted": "predicted GiB",
    "peak_gib_measured": "measured GiB",
    "tokens_per_second": "tokens/s",
    "tuned_loss": "loss",
    "loss_change": "change",
    "tuned_exact_match_percent": "exact %",
    "tuned_reward_accuracy": "in order",
    "tuned_reward_margin": "margin",
}


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
    """The document of `lean-finetune compare`.

    Raises:
        UserError: the command says so.
    """
    with workplace() as place:
        ended = run_command(["compare", "--json"], place, limits)
    if ended.code != 0:
        raise UserError(ended.fault)
    return experiments_document(json.loads(ended.out))


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


def experiments_document(rows: Sequence[Mapping[str, Any]]) -> Html:
    """The answer of `compare --json` as a table; columns without a value are left out."""
    names = [name for name in TITLES if any(row.get(name) is not None for row in rows)]
    header = ("experiment", *(TITLES[name] for name in names), "changed")
    cells = [(row["experiment"], *(_cell(row.get(name)) for name in names), _changed(row)) for row in rows]
    return document("Experiments", joined(_body(Table(header, cells))), STYLE)


def _body(found: Table) -> Iterator[Html]:
    yield table(found)
    yield Html('<p class="note">A figure is shown only if it was measured with the experiment\'s own parameters.</p>')


def _changed(row: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={json.dumps(value)}" for name, value in row["changed"].items())


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
