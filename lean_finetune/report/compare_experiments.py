"""Print experiments as a table with the change of their loss; reads `dvc exp show --json` from stdin.

A metric is shown only if the stage that wrote it ran with the experiment's own parameters (`own_stages.py`).
"""

import json
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from cuda_memory.page.html import visible
from lean_finetune.report.own_stages import WORKSPACE, hashes_in_cache, lock_of, own_files

NAME = "Experiment"
STATE = "state"
"""Column of experiments without results: queued, running, failed, or not readable."""
LOSS = "tuned_loss"
CHANGE = "loss_change"
RESULTS = ("peak_gib_predicted", "peak_gib_measured", "tokens_per_second", LOSS, CHANGE)
"""Columns after the name, so that they are seen in a terminal of 120 columns."""
OTHER_RESULTS = ("predicted_error_percent", "tuned_exact_match_percent")
"""Columns after the parameters."""
NO_RESULT = "run."
"""Start of the parameters that change no result, which are left out."""
OTHER_LOSS = ("model.", "data.")
"""Start of the parameters that decide what a loss is of: losses of different models or data cannot be subtracted."""
BASELINE = "baseline"
FINISHED = "success"
DIGITS = 4
EMPTY_NOTE = "empty: nothing was measured with these parameters; `dvc exp show` may have an earlier run's figures there"

Row = dict[str, Any]
Own = Callable[[str, Mapping[str, Any]], Collection[str]]
"""Revision and params.yaml of a row → the files that the row's own stages wrote."""


def rows_of(commits: Iterable[Mapping[str, Any]], own: Own) -> Iterator[Row]:
    """Yield name, parameters and own metrics: of the workspace, of each baseline and of its experiments."""
    for commit in commits:
        yield _row(commit, WORKSPACE if commit["rev"] == WORKSPACE else BASELINE, FINISHED, own)
        for experiment in commit["experiments"] or ():
            state, newest = (experiment["executor"] or {}).get("state", FINISHED), experiment["revs"][0]
            yield _row(newest, experiment["name"] or newest["name"] or newest["rev"][:7], state, own)


def _row(revision: Mapping[str, Any], name: str, state: str, own: Own) -> Row:
    """Return a row. An experiment that is not finished has the metrics of its baseline in DVC, so they are left out."""
    data = revision["data"]
    if data is None:
        return {NAME: name, STATE: state if state != FINISHED else "not readable"}
    params = data["params"].get("params.yaml", {}).get("data", {})
    row = {NAME: name, STATE: "" if state == FINISHED else state}
    row |= {dotted: value for dotted, value in _leaves(params) if not dotted.startswith(NO_RESULT)}
    if state == FINISHED:
        files = own(revision["rev"], params)
        for path in data["metrics"].keys() & files:
            row |= data["metrics"][path].get("data", {})
    return row


def table(rows: Sequence[Row]) -> str:
    """Return rows as aligned columns: results, and parameters that differ between rows."""
    baseline = next((row for row in rows if row[NAME] == BASELINE), {})
    shown = [{**row, CHANGE: _loss_change(row, baseline)} for row in rows]
    parameters = {name: None for row in rows for name in row if "." in name or name == "seed"}
    differing = [name for name in parameters if len({str(row[name]) for row in rows if name in row}) > 1]
    possible = (NAME, STATE, *RESULTS, *differing, *OTHER_RESULTS)
    columns = [name for name in possible if name in differing or any(_cell(row.get(name)) for row in shown)]
    cells = [columns, *([_cell(row.get(name)) for name in columns] for row in shown)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    padded = ([f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)] for line in cells)
    return "\n".join("  ".join(line).rstrip() for line in padded)


def _loss_change(row: Row, baseline: Row) -> str | None:
    """Return the loss minus the baseline's; None if unknown, or if the row has another model or other data."""
    loss, before = row.get(LOSS), baseline.get(LOSS)
    same = all(row.get(name) == baseline.get(name) for name in {*row, *baseline} if name.startswith(OTHER_LOSS))
    return f"{loss - before:+.{DIGITS}g}" if same and loss is not None and before is not None else None


def _leaves(params: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted name and value of each parameter."""
    for key, value in params.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _cell(value: Any) -> str:
    """Return a value as text: decimal numbers with `DIGITS`, nothing for None."""
    if isinstance(value, float):
        return f"{value:.{DIGITS}g}"
    return "" if value is None else visible(str(value)).replace("\n", "\\n").replace("\t", "\\t")


def main() -> None:
    """Print the table, and what its empty cells mean."""
    text = sys.stdin.read()
    commits = json.loads(text) if text.strip() else []
    if not commits:
        sys.exit("error: dvc exp show: printed no experiments; see its message above")
    hash_inside = hashes_in_cache()
    rows = list(rows_of(commits, lambda revision, params: set(own_files(lock_of(revision), params, hash_inside))))
    print(table(rows))
    if any(row.keys().isdisjoint(RESULTS[1:]) for row in rows):
        print(EMPTY_NOTE)


if __name__ == "__main__":
    main()
