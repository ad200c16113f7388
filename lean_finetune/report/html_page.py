"""Write report.html: one page without scripts or links to other files, for a browser without network."""

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from cuda_memory.page.charts import figure
from cuda_memory.page.html import Html, Table, document, table, visible
from lean_finetune.pinning.descriptions import describe_data, describe_model
from lean_finetune.report import content
from lean_finetune.report.pictures import pictures
from lean_finetune.report.report_inputs import Inputs

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
        pictures=pictures(inputs),
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
    """The pinned content of model and data: name, owner and hash of each file."""
    model = [(name, describe_model(inputs.model), digest) for name, digest in inputs.model["files"].items()]
    sources = inputs.data["sources"]
    data = [(file["path"], source["source"], file["sha256"]) for source in sources for file in source["files"]]
    return Table(("file", "of", "SHA-256"), model + data)
