"""The commands `lean-finetune exp`, DVC's with checked parameters, and `compare`: experiments side by side."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from shutil import get_terminal_size
from typing import Any

import click

from cuda_memory.errors import write_errors
from cuda_memory.terminal import echo, echo_json
from cuda_memory.user_paths import PATH
from lean_finetune.commands.run.place import commit_command, is_project
from lean_finetune.config.load import PARAMS_FILE, load_params, refuse_unknown
from lean_finetune.core.atomic_files import write_text
from lean_finetune.core.errors import UsageFault, UserError
from lean_finetune.core.stage_command import StageCommand
from lean_finetune.report.compare_experiments import (
    CHANGE,
    EMPTY_NOTE,
    LOSS,
    NAME,
    NO_RESULT,
    PAIRS,
    RESULTS,
    STATE,
    WORKSPACE,
    ExperimentRow,
    cell,
    loss_change,
    own_rows,
)

# The command `lean-finetune exp`.

SET = ("-S", "--set-param")
"""DVC's option for a value of a parameter."""
OPERATORS = "+~"
"""Hydra's, before a key: add it, remove it."""


@click.command("exp", cls=StageCommand, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def exp(arguments: tuple[str, ...]) -> None:
    """Run `dvc exp ARGUMENTS`, after a check of the parameters that -S sets.

    DVC answers an unknown parameter with advice to add it. Here the answer is the parameter that may be meant.

    For example: lean-finetune exp run -S train.epochs=3
    """
    _need_project()
    p = load_params()
    for text in _overrides(arguments):
        file, _, key = text.partition("=")[0].lstrip(OPERATORS).rpartition(":")
        if file in ("", PARAMS_FILE.name):
            try:
                refuse_unknown(key.strip(), p)
            except UserError as error:
                raise UsageFault(f"-S: {error}") from None
    if arguments[:1] == ("run",):
        _need_commit()
    from lean_finetune.commands.run.pipeline import use_this_python

    use_this_python()
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "dvc", "exp", *arguments])


def _overrides(arguments: Sequence[str]) -> Iterator[str]:
    """The values of -S in DVC's arguments."""
    for number, word in enumerate(arguments):
        if word in SET:
            yield from arguments[number + 1 : number + 2]
        elif word.startswith("--set-param="):
            yield word.partition("=")[2]
        elif word.startswith("-S"):
            yield word.removeprefix("-S")


def _need_project() -> None:
    if not is_project(Path()):
        raise UserError("here is no project; run in a project's directory, or make one with `lean-finetune run`")


def _need_commit() -> None:
    if (command := commit_command(Path())) is not None:
        raise UserError(f"no commit has this project yet, and experiments start from one; `{command}`, then rerun")


# The command `lean-finetune compare`.

COLUMNS = 100
"""Columns where the output is no terminal."""
CHANGED, FEWEST, MOST_NAME = "changed", 26, 18
TITLES = {
    NAME: "experiment",
    STATE: "state",
    "peak_gib_predicted": "predicted",
    "peak_gib_measured": "measured",
    "tokens_per_second": "tok/s",
    LOSS: "loss",
    CHANGE: "change",
    "tuned_exact_match_percent": "exact %",
    **dict(zip(PAIRS, ("in order", "margin"), strict=True)),
}
"""Titles of the columns that matter; the last one is what was changed."""
LEGEND = "predicted, measured: peak of tensors in GiB; loss: held out, and its change from the baseline's"


@click.command(cls=StageCommand)
@click.option("--html", type=PATH, help="Also write a page with the curves of loss and memory.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON with all figures and parameters that differ.")
def compare(html: Path | None, as_json: bool) -> None:
    """Show this commit's experiments side by side: what changed, memory, speed and loss. `dvc exp show` has the rest.

    A figure is shown only if it was measured with the experiment's own parameters.
    """
    if html is not None and (not html.name or html.is_dir() or not html.absolute().parent.is_dir()):
        raise UsageFault(f"--html: must be a file in a directory that exists; got {str(html)!r}")
    _need_project()
    _need_commit()
    rows = own_rows(_commits())
    baseline = next((row for row in rows if row[NAME] != WORKSPACE), rows[0])
    shown = [
        {
            **{key: value for key, value in row.items() if key in TITLES},
            CHANGE: loss_change(row, baseline),
            CHANGED: _changed(row, baseline),
        }
        for row in rows
    ]
    if html is not None:
        from lean_finetune.commands.run.compare_page import comparison_page
        from lean_finetune.report.compare_experiments import curve_files

        with write_errors(html):
            write_text(html, comparison_page([_json(row) for row in shown], curve_files(rows)))
    if as_json:
        echo_json([_json(row) for row in shown])
        return
    for line in _table_lines(shown, get_terminal_size((COLUMNS, 24)).columns):
        echo(line)
    echo(LEGEND)
    if any(row.keys().isdisjoint(RESULTS[1:]) and not row.get(STATE) for row in rows):
        echo(EMPTY_NOTE)


def _json(row: ExperimentRow) -> dict[str, Any]:
    figures = {key: row.get(key) for key in TITLES if key not in (NAME, STATE, CHANGE)}
    change = None if row[CHANGE] is None else float(row[CHANGE])
    return {
        "experiment": row[NAME],
        "state": row.get(STATE) or "finished",
        **figures,
        CHANGE: change,
        CHANGED: dict(row[CHANGED]),
    }


def _commits() -> list[Any]:
    """What `dvc exp show --json` prints."""
    from dvc.exceptions import DvcException
    from dvc.repo import Repo
    from scmrepo.exceptions import SCMError

    from lean_finetune.commands.run.pipeline import dvc_refusal

    try:
        with Repo() as repo:
            return [json.loads(json.dumps(one.dumpd(), default=str)) for one in repo.experiments.show()]
    except (DvcException, SCMError) as error:
        raise dvc_refusal(error) from error


def _changed(row: ExperimentRow, baseline: ExperimentRow) -> list[tuple[str, Any]]:
    """The parameters of a row that differ from the baseline's."""
    names = [name for name in row if ("." in name or name == "seed") and not name.startswith(NO_RESULT)]
    return [(name, row[name]) for name in names if name not in baseline or row[name] != baseline[name]]


def _table_lines(rows: Sequence[ExperimentRow], columns: int) -> Iterator[str]:
    """The rows as a table. What changed is the last column or, where the terminal is too narrow, below each row."""
    names = [name for name in TITLES if name == NAME or any(cell(row.get(name)) for row in rows)]
    cells = [[TITLES[name] for name in names]]
    cells += [[_clipped(cell(row.get(name)), MOST_NAME) for name in names] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    left = sum(widths) + 2 * len(widths)
    below = columns - left < FEWEST
    indent = 4 if below else left
    texts = [[CHANGED], *(list(_packed(row[CHANGED], columns - indent)) for row in rows)]
    for line, parts in zip(cells, texts, strict=True):
        first = "  ".join(_aligned(text, width, k) for k, (text, width) in enumerate(zip(line, widths, strict=True)))
        yield first.rstrip() if below or not parts else f"{first}  {parts[0]}"
        yield from (f"{'':<{indent}}{part}" for part in (parts if below else parts[1:]))


def _aligned(text: str, width: int, column: int) -> str:
    return f"{text:<{width}}" if column == 0 else f"{text:>{width}}"


def _packed(changed: Sequence[tuple[str, Any]], width: int) -> Iterator[str]:
    """`key=value` texts in lines of at most `width` columns."""
    line = ""
    for name, value in changed:
        text = _clipped(f"{name}={json.dumps(value, default=str)}", width)
        if line and len(line) + 1 + len(text) > width:
            yield line
            line = ""
        line = f"{line} {text}".strip()
    if line:
        yield line


def _clipped(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."
