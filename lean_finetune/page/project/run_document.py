"""The run as a document: where it is, its loss and memory against the prediction, what came out, and what it says."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cuda_memory.page.charts import figure
from cuda_memory.page.html import Html, Table, document, html, joined, table
from cuda_memory.units import readable_size
from lean_finetune.commands.run.outcome import Outcome, change_text, last_turn, memory_text
from lean_finetune.page.project.documents import STYLE
from lean_finetune.page.project.project_run import RunState
from lean_finetune.page.project.training_curves import Step
from lean_finetune.report.charts import loss_chart, memory_chart
from lean_finetune.report.formats import percent

SPEED_STEPS = 10
"""Last steps whose speed is shown."""
ENDS = ("end", "failed", "error")


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is known of the training that wrote its curves last."""

    steps: Sequence[Step]
    written: float
    """When, in seconds since the epoch; 0: never."""
    peak_bytes: int | None
    """Predicted."""
    planned_steps: int | None


def run_document(state: RunState, training: Training) -> Html:
    """The page of a run."""
    return document("lean-finetune run", joined(_body(state, training)), STYLE)


def _body(state: RunState, training: Training) -> Iterator[Html]:
    text, is_good = status(state)
    steps, peak_bytes = training.steps, training.peak_bytes
    yield html('<p class="verdict {}">{}</p>', "good" if is_good else "bad", text)
    if not state.is_running and training.written > state.said_last:
        yield Html('<p class="note">The figures of training are of one that was started outside of this page.</p>')
    ended = None if state.is_running else state.last("end")
    if steps:
        result = '<div><dt>{}</dt><dd class="value">{}</dd><dd class="quiet">{}</dd></div>\n'
        results = joined(html(result, *each) for each in _results(steps, peak_bytes, training.planned_steps))
        yield html('<dl class="results">\n{}</dl>', results)
        yield html('<div class="columns">{}</div>', joined(_charts(steps, peak_bytes)))
    if ended is not None:
        figures: dict[str, Any] = {name: ended.get(name) for name in Outcome.__annotations__}
        yield from _outcome(Outcome(**figures))
    if state.events:
        yield Html("<h2>Stages</h2>")
        yield table(Table(("stage", "seconds"), _stages(state)), "figures")
    if state.said:
        yield html('<h2>Last lines</h2><pre class="row">{}</pre>', "\n".join(state.said))


def status(state: RunState) -> tuple[str, bool]:
    """Where the run is, in one line, and whether all is well."""
    stage = state.last("stage", "planning", *ENDS)
    if state.is_running:
        if state.is_stopping:
            return "Stops: saves what the next run goes on from", True
        if stage is None or stage["event"] != "stage":
            return "Looks for memory switches that fit" if stage is not None else "Starts", True
        return f"Runs: stage {stage.get('number')} of {stage.get('of')}, {stage.get('stage')}", True
    if not state.started:
        return "No page has started a run here", True
    if stage is not None and stage["event"] == "end":
        return "Finished", True
    if state.is_stopping:
        return "Stopped. Run goes on from here", True
    where = f"Stage {stage.get('stage')} failed" if stage is not None and stage["event"] == "failed" else "Failed"
    fault = None if stage is None else stage.get("error")
    return f"{where}: {fault or 'it was ended, or has an error of its own; see the last lines'}", False


def _results(steps: Sequence[Step], peak_bytes: int | None, planned: int | None) -> Iterator[tuple[str, str, str]]:
    """The most important figures of training, with what to compare them with."""
    yield "Step", f"{int(steps[-1]['step']) + 1:,}", f"of {planned:,}" if planned else "of training"
    heldout = [step["heldout_loss"] for step in steps if step.get("heldout_loss")]
    yield "Loss", f"{float(steps[-1]['loss']):.4g}", f"held out {float(heldout[-1]):.4g}" if heldout else "of this step"
    measured = [int(float(step["allocated_bytes"])) for step in steps if step.get("allocated_bytes")]
    predicted = f"{readable_size(peak_bytes)} predicted" if peak_bytes else "no prediction yet"
    yield "Peak memory", readable_size(max(measured)) if measured else "not measured", predicted
    last = steps[-SPEED_STEPS:]
    seconds = sum(float(step.get("seconds") or 0) for step in last)
    if seconds:
        speed = sum(float(step.get("tokens") or 0) for step in last) / seconds
        yield "Speed", f"{speed:,.0f} tokens/s", f"over {len(last)} steps"


def _charts(steps: Sequence[Step], peak_bytes: int | None) -> Iterator[Html]:
    """Those of the report, as far as training is."""
    yield figure(loss_chart(steps))
    if peak_bytes is not None:
        on_gpu = any(step.get("pinned_bytes") for step in steps)
        yield figure(memory_chart(steps, peak_bytes, on_gpu=on_gpu, note="A few steps are measured."))


def _outcome(found: Outcome) -> Iterator[Html]:
    """What `run` prints at its end."""
    yield Html("<h2>What came out</h2>")
    rows = [
        ("memory", memory_text(found)),
        ("held-out loss", change_text(found.base_loss, found.tuned_loss, lambda loss: f"{loss:.4g}")),
    ]
    if found.tuned_reward_accuracy is not None:
        rows.append(("right order", change_text(found.base_reward_accuracy, found.tuned_reward_accuracy, percent)))
    yield table(Table(("", ""), rows))
    for answer in found.answers or ():
        yield html('<section class="answer">{}</section>', joined(_answer(answer)))


def _answer(line: Mapping[str, Any]) -> Iterator[Html]:
    """One held-out prompt, and its answers side by side."""
    part = "<div><dt>{}</dt><dd><pre>{}</pre></dd></div>"
    question = [("asked", last_turn(str(line.get("prompt")))), ("expected", str(line.get("expected") or ""))]
    beside = [("before training", str(line.get("base"))), ("after", str(line.get("tuned")))]
    for kind, parts in (("question", question), ("beside", beside)):
        yield html('<dl class="{}">{}</dl>', kind, joined(html(part, *each) for each in parts if each[1]))


def _stages(state: RunState) -> list[tuple[str, str]]:
    """Each stage that ran, and its seconds."""
    rows = []
    for event in state.events:
        if event["event"] == "stage":
            rows.append((f"{event.get('stage')}", "from the cache" if event.get("cached") else "…"))
        elif event["event"] == "stage_end" and rows and rows[-1][1] == "…":
            rows[-1] = (rows[-1][0], f"{event.get('seconds')}")
        elif event["event"] in ("note", "plan", "commit"):
            said = event.get("text") or event.get("words") or event.get("commit")
            rows.append((f"{event['event']}: {said}", ""))
    return rows
