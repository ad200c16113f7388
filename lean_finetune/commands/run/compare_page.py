"""The page of `compare --html`: the table, and the curves of loss and memory of experiments side by side."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from cuda_memory.page.charts import SERIES_COLORS, Bar, Line, Picture, bar_chart, figure, step_lines
from cuda_memory.page.html import Html, Table, document, html, joined, table
from cuda_memory.units import GIB, readable_size
from lean_finetune.core.errors import UserError
from lean_finetune.report.charts import memory_chart
from lean_finetune.report.compare_experiments import WORKSPACE
from lean_finetune.report.report_inputs import read_csv

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
COLORS = ("#3f6fd8", "#d1495b", "#2a9d8f", "#e08a3c", "#8a6bbe", "#8a8f3c", "#c05a9a", "#6b7280")
"""One for each experiment that is drawn."""
DRAWN = ("step", "loss", "heldout_loss", "allocated_bytes", "live_bytes", "reserved_bytes")


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """An experiment that is drawn."""

    name: str
    color: str
    row: Mapping[str, Any]
    steps: Sequence[Mapping[str, str]]

    def points(self, column: str) -> list[tuple[int, float]]:
        """A figure by step, where it is known."""
        return [(int(step["step"]), float(step[column])) for step in self.steps if step.get(column)]


def comparison_page(rows: Sequence[Mapping[str, Any]], curves: Sequence[Path | None]) -> Html:
    """The page for the rows of `compare --json`; `curves` are the curves.csv of each, if it has one."""
    return document("Experiments", joined(_body(rows, curves)))


def _body(rows: Sequence[Mapping[str, Any]], curves: Sequence[Path | None]) -> Iterator[Html]:
    names = [name for name in TITLES if any(row.get(name) is not None for row in rows)]
    header = ("experiment", *(TITLES[name] for name in names), "changed")
    cells = [(row["experiment"], *(_cell(row.get(name)) for name in names), _changed(row)) for row in rows]
    yield table(Table(header, cells))
    yield Html('<p class="note">A figure is shown only if it was measured with the experiment\'s own parameters.</p>')
    found = list(_with_curves(rows, curves))
    if not found:
        yield Html('<p class="note">No curves: none of these has trained here with its own parameters.</p>')
        return
    colored = zip(COLORS, found, strict=False)
    drawn = [Drawn(name=row["experiment"], color=color, row=row, steps=steps) for color, (row, steps) in colored]
    if len(drawn) < len(found):
        yield html('<p class="note">The first {} of {} with curves are drawn.</p>', len(drawn), len(found))
    yield html('<div class="columns">{}</div>', joined(map(figure, _of_all(drawn))))
    yield Html("<h2>Memory of each</h2>")
    yield html('<div class="columns">{}</div>', joined(_memory(one) for one in drawn))


def _with_curves(
    rows: Sequence[Mapping[str, Any]], curves: Sequence[Path | None]
) -> Iterator[tuple[Mapping[str, Any], list[dict[str, str]]]]:
    """The rows that have curves which can be drawn, with these."""
    read = {row["experiment"]: _steps(path) for row, path in zip(rows, curves, strict=True)}
    if read.get(WORKSPACE) in [steps for name, steps in read.items() if name != WORKSPACE]:
        del read[WORKSPACE]  # It has the results of a commit, whose name says more.
    for row in rows:
        if steps := read.get(row["experiment"]):
            yield row, steps


def _steps(path: Path | None) -> list[dict[str, str]]:
    """The lines of a curves.csv; none if it is missing or damaged."""
    try:
        steps = [] if path is None else read_csv(path)
        is_whole = all(math.isfinite(float(step[name])) for step in steps for name in DRAWN if step.get(name))
        return steps if is_whole and all(int(step["step"]) >= 0 and step["loss"] for step in steps) else []
    except (UserError, ValueError, KeyError, TypeError):
        return []


def _of_all(drawn: Sequence[Drawn]) -> Iterator[Picture]:
    """Pictures with all experiments in one."""
    for title, column in (("Training loss", "loss"), ("Held-out loss", "heldout_loss")):
        is_heldout = column != "loss"
        points = [(one, one.points(column)) for one in drawn]
        lines = [
            Line(name=one.name, color=one.color, points=of_one, dots=is_heldout, reduce=fmean)
            for one, of_one in points
            if of_one
        ]
        if any(len(line.points) > 1 for line in lines):
            yield step_lines(title, lines, from_zero=False)
    bars = [bar for one in drawn if (bar := _peak_bar(one)) is not None]
    if bars:
        title = "Peak memory of tensors: predicted, and measured (thin bar)"
        yield Picture(title, bar_chart(bars, title=title), [])


def _peak_bar(one: Drawn) -> Bar | None:
    predicted, measured = (one.row.get(f"peak_gib_{name}") for name in ("predicted", "measured"))
    if predicted is None:
        return None
    text, thin = readable_size(round(predicted * GIB)), None
    if measured is not None:
        text += f", measured {readable_size(round(measured * GIB))}"
        thin = ("measured", SERIES_COLORS["measured"], measured * GIB)
    return Bar(label=one.name, text=text, segments=[("predicted", one.color, predicted * GIB)], thin=thin)


def _memory(one: Drawn) -> Html:
    """The memory of one experiment over its steps."""
    predicted, on_gpu = one.row.get("peak_gib_predicted"), any(step.get("pinned_bytes") for step in one.steps)
    peak_bytes = None if predicted is None else round(predicted * GIB)
    if peak_bytes is None and not any(one.points(name) for name in ("allocated_bytes", "live_bytes")):
        return Html("")
    chart = memory_chart(one.steps, peak_bytes, on_gpu=on_gpu, note=_changed(one.row))
    return figure(chart._replace(title=f"{one.name}: {chart.title[0].lower()}{chart.title[1:]}"))


def _changed(row: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={json.dumps(value)}" for name, value in row["changed"].items())


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
