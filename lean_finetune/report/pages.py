"""Lay the report out: HTML, Markdown and the page of plots."""

import json
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from textwrap import indent
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from ruamel.yaml import YAML

from cuda_memory.page.charts import figure
from cuda_memory.page.html import Html, Table, document, table
from cuda_memory.terminal import echo, visible
from lean_finetune.core.versions import install_extra
from lean_finetune.islands.thumbnails import thumbnails
from lean_finetune.pinning.locate import describe_data, describe_model
from lean_finetune.report import content, pairs
from lean_finetune.report.charts import charts
from lean_finetune.report.content import NOT_EVALUATED, WITHOUT_TEXT
from lean_finetune.report.report_inputs import Inputs

MARKUP = re.compile(r"[\\`<>\[\]|&]")
"""Characters with which Markdown begins links, HTML, entities, code and cells."""


def markdown_page(inputs: Inputs, parameters: Mapping[str, Any], metrics: Mapping[str, Any]) -> str:
    """Return the page; `parameters` are the run's by dotted name, `metrics` the report's figures."""
    found = content.results(inputs, metrics)
    lines = [f"- **{name}**: {_text(value)} ({_text(note.rstrip('.'))})" for name, value, note in found]
    sections = ["# Fine-tuning report", "Charts and samples of the data: report.html", "\n".join(lines)]
    sections += ["## What was trained", _table(content.run_table(inputs, parameters))]
    sections += [*_memory(inputs, metrics), *_loss(inputs), *_pairs(inputs, parameters), *_answers(inputs)]
    return "\n\n".join(sections) + "\n"


def markdown_text(text: str) -> str:
    """Return a text as one line of Markdown that shows it: no links, HTML or cells."""
    return MARKUP.sub(r"\\\g<0>", visible(" ".join(text.split())))


def _memory(inputs: Inputs, metrics: Mapping[str, Any]) -> list[str]:
    """Predicted and measured peaks, and the tensors at the peak."""
    refusal, tiers, dashes = inputs.verdict["refusal"], content.tiers_table(inputs), content.dash_note(inputs)
    return [
        "## Memory",
        *([] if refusal is None else [f"Verdict: {_text(refusal)}."]),
        _text(content.measured_note(inputs)),
        _table(content.phases_table(inputs, metrics)),
        *([] if dashes is None else [_text(dashes)]),
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
        return ["## Loss", WITHOUT_TEXT if pairs.has_pairs(inputs) else NOT_EVALUATED]
    merged = content.merged_note(inputs)
    return ["## Loss", _table(content.loss_table(inputs)), *([] if merged is None else [merged])]


def _pairs(inputs: Inputs, parameters: Mapping[str, Any]) -> list[str]:
    """Figures of held-out preference pairs, and those whose order changed; nothing for other rows."""
    if not pairs.has_pairs(inputs):
        return []
    changed = [part for title, table in pairs.changed_pairs_tables(inputs) for part in (f"### {title}", _table(table))]
    note = _text(pairs.pairs_note(inputs, parameters))
    return [f"## {pairs.words_of(inputs).title}", _table(pairs.pairs_table(inputs)), note, *changed]


def _answers(inputs: Inputs) -> list[str]:
    """Exact match by family, and a few sample answers."""
    note, tasks = content.answers_note(inputs), content.tasks_table(inputs)
    sections = ["## Answers", *([] if tasks is None else [_table(tasks)]), *([] if note is None else [_text(note)])]
    if inputs.generations:
        sections += [_table(content.families_table(inputs)), "### Samples"]
    for family, _, parts in content.answer_samples(inputs):
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


# Write a template for `dvc plots show --html-template` that contains its scripts, so that plots are drawn offline.
#
# DVC's own template loads Vega from a content delivery network.

# DVC replaces {plot_divs}. The function keeps the bundle's names out of the page.
PAGE = """<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><link rel="icon" href="data:,"><title>Plots</title>
<script>(function () {BUNDLE})();</script>
</head>
<body>{plot_divs}</body>
</html>
"""


def write_template(path: Path) -> None:
    """Write the template with the scripts of vl-convert-python, the extra `plots`."""
    try:
        from vl_convert import javascript_bundle
    except ImportError:
        sys.exit(f"error: plots without a network need a package that is not installed; run {install_extra('plots')}")
    bundle = javascript_bundle("window.vegaEmbed = vegaEmbed;")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(PAGE.replace("BUNDLE", f"{{{bundle}}}"), encoding="utf-8")


def plots_with_data(directory: Path) -> Iterator[str]:
    """Yield the names of the plots in dvc.yaml whose files exist; DVC draws an empty place for any other."""
    for plot in YAML(typ="safe").load((directory / "dvc.yaml").read_text(encoding="utf-8"))["plots"]:
        for name, properties in plot.items():
            if all((directory / file).exists() for file in properties["y"]):
                yield name


if __name__ == "__main__":
    write_template(Path(sys.argv[1]))
    echo(" ".join(plots_with_data(Path())))


# Write report.html: one page without scripts or links to other files, for a browser without network.

TEMPLATES = Path(__file__).with_name("templates")
PLAIN = re.compile(r"[\w./@+-]+(:[\w./@+-]+)*")
"""Text that the grammar of `-S` reads as text without quotes."""


def html_page(inputs: Inputs, parameters: Mapping[str, Any], metrics: Mapping[str, Any]) -> str:
    """Return the page; `parameters` are the run's by dotted name, `metrics` the report's figures."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        finalize=lambda value: type(value)(visible(value)) if isinstance(value, str) else value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    body = environment.get_template("report.html").render(
        table=table,
        figure=figure,
        model=describe_model(inputs.model),
        data=describe_data(inputs.data),
        inputs=inputs,
        parameters=parameters,
        metrics=metrics,
        content=content,
        pairs=pairs,
        charts=charts(inputs),
        thumbnails=partial(thumbnails, inputs.tokens),
        command=command(parameters),
        locks=locks_table(inputs),
    )
    return document(f"Fine-tuning report: {describe_model(inputs.model)}", Html(body))


def command(parameters: Mapping[str, Any]) -> str:
    """Return the command that sets every parameter of the run and runs it."""
    flags = [f"-S {shlex.quote(f'{name}={override(value)}')}" for name, value in parameters.items()]
    return " \\\n  ".join(["dvc exp run", *flags])


def override(value: Any) -> str:
    """Return a value as the grammar of `dvc exp run -S` (Hydra's) reads it."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{override(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(override, value)) + "]"
    if isinstance(value, str) and PLAIN.fullmatch(value):
        return value
    return json.dumps(value, ensure_ascii=False)


def locks_table(inputs: Inputs) -> Table:
    """The pinned content of model, adapter and data: name, owner and hash of each file."""
    files = {**inputs.model["files"], **inputs.model.get("adapter", {}).get("files", {})}
    model = [(name, describe_model(inputs.model), digest) for name, digest in files.items()]
    sources = inputs.data["sources"]
    data = [(file["path"], source["source"], file["sha256"]) for source in sources for file in source["files"]]
    return Table(("file", "of", "SHA-256"), model + data)
