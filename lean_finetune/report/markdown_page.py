"""Write report.md: the report for terminals."""

import re
from collections.abc import Mapping
from textwrap import indent
from typing import Any

from cuda_memory.page.html import Table, visible
from lean_finetune.report import content
from lean_finetune.report.content import NOT_EVALUATED
from lean_finetune.report.report_inputs import Inputs

MARKUP = re.compile(r"[\\`<>\[\]|&]")
"""Characters with which Markdown begins images, links, HTML, entities, code and cells."""


def markdown_page(inputs: Inputs, parameters: Mapping[str, Any], metrics: Mapping[str, Any]) -> str:
    """Return the page; `parameters` are the run's by dotted name, `metrics` the report's figures."""
    found = content.results(inputs, metrics)
    lines = [f"- **{name}**: {_text(value)} ({_text(note.rstrip('.'))})" for name, value, note in found]
    sections = ["# Fine-tuning report", "Charts and samples of the data: report.html", "\n".join(lines)]
    sections += ["## What was trained", _table(content.run_table(inputs, parameters))]
    sections += [*_memory(inputs, metrics), *_loss(inputs), *_answers(inputs)]
    return "\n\n".join(sections) + "\n"


def markdown_text(text: str) -> str:
    """Return a text as one line of Markdown that shows it: no images, links, HTML or cells."""
    return MARKUP.sub(r"\\\g<0>", visible(" ".join(text.split())))


def _memory(inputs: Inputs, metrics: Mapping[str, Any]) -> list[str]:
    """Predicted and measured peaks, and the tensors at the peak."""
    refusal, tiers = inputs.verdict["refusal"], content.tiers_table(inputs)
    return [
        "## Memory",
        *([] if refusal is None else [f"Verdict: {_text(refusal)}."]),
        _text(content.measured_note(inputs)),
        _table(content.phases_table(inputs, metrics)),
        *([] if tiers is None else [_table(tiers), _text(content.plan_note(inputs))]),
        f"Memory over the run: {_text(inputs.train['growth']['summary'])}.",
        f"Tensors at the predicted peak ({_text(inputs.estimate['worst_phase'])}), by category:",
        _table(content.categories_table(inputs)),
        "The largest tensors at the peak, and the module that allocates them:",
        _table(content.tensors_table(inputs)),
        "Memory that persists between steps, computed from shapes and types:",
        _table(content.states_table(inputs)),
        "Predicted peak after changing one switch:",
        _table(content.switches_table(inputs)),
    ]


def _loss(inputs: Inputs) -> list[str]:
    """Held-out loss by row length."""
    if not inputs.evaluate["evaluated_rows"]:
        return ["## Loss", NOT_EVALUATED]
    merged = content.merged_note(inputs)
    return ["## Loss", _table(content.loss_table(inputs)), *([] if merged is None else [merged])]


def _answers(inputs: Inputs) -> list[str]:
    """Exact match by family, and a few sample answers."""
    note, tasks = content.answers_note(inputs), content.tasks_table(inputs)
    sections = ["## Answers", *([] if tasks is None else [_table(tasks)]), *([] if note is None else [_text(note)])]
    if inputs.generations:
        sections += [_table(content.families_table(inputs)), "### Samples"]
    for family, parts in content.answer_samples(inputs):
        sections.append(f"#### {_text(family)}")
        for title, text, correct in parts:
            judged = "" if correct is None else f" ({'correct' if correct else 'wrong'})"
            sections.append(f"{title}{judged}:\n\n{indent(visible(text), '    ', lambda _: True)}")
    return sections


def _table(table: Table) -> str:
    """Return a Markdown table; every column but the first is right-aligned."""
    lines = [table.header, ("---", *("---:" for _ in table.header[1:])), *table.rows]
    return "\n".join(f"| {' | '.join(_text(value) for value in line)} |" for line in lines)


def _text(value: Any) -> str:
    """Return a value as text that Markdown shows as it is."""
    return markdown_text(str(value))
