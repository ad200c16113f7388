"""Draw charts as inline SVG: widths in percent, so that text keeps its size on a phone and on a desktop.

Text, axes and the capacity take their colours from the page's style sheet, which has a light and a dark theme.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cuda_memory.page.html import Html, html, joined
from cuda_memory.units import reading_unit

BAR_ROW = 46
"""Height of a row of a bar chart, in pixels: a line of text, a bar and a thin bar."""
LINE_HEIGHT = 220
SCALE = 1000
"""Width and height of the coordinates that lines and areas are drawn in."""
MOST_POINTS = 500
"""Points of a line; longer curves are reduced."""
NAMED_SHARE = 16.0
"""Least width of a phase that fits its name on a phone, in percent."""
TICKS = 4

RECORDED_COLORS = {
    "earlier": "#5f7f7f",
    "weights": "#4c78a8",
    "autocast": "#8fb8de",
    "optimizer": "#8a6bbe",
    "gradients": "#c05a9a",
    "activations": "#e08a3c",
    "scores": "#a9a13c",
    "logits": "#d1495b",
    "backward": "#e6c229",
    "unknown": "#8d8d8d",
}
"""Colour of each category of recorded memory, from the most persistent to the most temporary."""
TEXT = "currentColor"
"""The colour of the page's text, dark or light."""

SERIES_COLORS = {
    "measured": TEXT,
    "predicted": "#7d8590",
    "live": "#12b886",
    "reserved": "#7048e8",
    "expandable": "#b197fc",
    "process": "#868e96",
    "training": "#5c7cfa",
    "heldout": TEXT,
    "current": TEXT,
    "saves": "#12b886",
    "costs": "#adb5bd",
}
"""Colour of each line or bar that is not a category of memory."""
SWITCH_LEGEND = {"saves": "needs less", "current": "this run", "costs": "needs more, or the same"}


class Picture(NamedTuple):
    """A chart with its caption."""

    title: str
    svg: Html
    legend: list[tuple[str, str]]
    """Colour and name of each series."""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A row of a bar chart."""

    label: str
    text: str
    """Right of the label, above the bar."""
    segments: Sequence[tuple[str, str, float]]
    """Name, colour and length of each part, from left to right."""
    thin: tuple[str, str, float] | None = None
    """A second, thin bar below the first."""
    strong: bool = False
    """Whether the label is bold."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of a chart."""

    name: str
    color: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False
    dots: bool = False
    """Draw the points, too."""
    reduce: Callable[[Iterable[float]], float] = field(default=max)
    """Value shown for several points of a long curve."""


def bar_chart(bars: Sequence[Bar], *, title: str, capacity: float | None = None) -> Html:
    """Return horizontal bars from zero, with a dashed line at `capacity`."""
    longest = max(max(sum(size for *_, size in bar.segments), bar.thin[2] if bar.thin else 0.0) for bar in bars)
    limit = max(longest, capacity or 0.0) or 1.0
    parts = []
    for number, bar in enumerate(bars):
        top, start = number * BAR_ROW, 0.0
        style = Html(' class="strong"') if bar.strong else ""
        parts.append(html('<text x="0" y="{}"{}>{}</text>', top + 13, style, bar.label))
        parts.append(html('<text x="100%" y="{}" class="end">{}</text>', top + 13, bar.text))
        for name, color, size in bar.segments:
            parts.append(_rectangle(start / limit, top + 19, size / limit, 13, color, name))
            start += size
        if bar.thin is not None:
            name, color, size = bar.thin
            parts.append(_rectangle(0.0, top + 33, size / limit, 5, color, name))
        if capacity is not None:
            line = '<line x1="{0:.2f}%" x2="{0:.2f}%" y1="{1}" y2="{2}" class="capacity"/>'
            parts.append(html(line, 100 * capacity / limit, top + 17, top + 41))
    return _svg(parts, title, len(bars) * BAR_ROW, "bars")


def line_chart(lines: Sequence[Line], *, title: str, x_label: str, from_zero: bool = True) -> Html:
    """Return lines over a common x axis; `from_zero` starts the y axis at zero."""
    shown = [(line, _reduced(line)) for line in lines if line.points]
    x_values = [x for _, points in shown for x, _ in points]
    y_values = [y for _, points in shown for _, y in points]
    x_range = (min(x_values), max(x_values))
    low, high = 0.0 if from_zero else min(y_values), max(y_values)
    y_ticks = _ticks(low, high)
    y_range = (min(low, y_ticks[0]), max(high, y_ticks[-1]))
    inner, dots = [], []
    for line, points in shown:
        places = [(_place(x, x_range), 1 - _place(y, y_range)) for x, y in points]
        path = _path(points, x_range, y_range)
        dash = Html(' class="dashed"') if line.dashed else ""
        inner.append(html('<polyline points="{}" stroke="{}"{}/>', path, line.color, dash))
        if line.dots or len(places) == 1:
            dots += [
                html('<circle cx="{:.2f}%" cy="{:.2f}%" r="3" fill="{}"/>', 100 * x, 100 * y, line.color)
                for x, y in places
            ]
    parts = [*_axes(x_range, y_range, y_ticks, x_label), _stretched(inner), *dots]
    return _svg(parts, title, LINE_HEIGHT, "plot")


def area_chart(
    x_values: Sequence[float],
    layers: Sequence[tuple[str, str, Sequence[float]]],
    phases: Sequence[str],
    *,
    title: str,
    x_label: str,
    line: tuple[str, Sequence[float]] | None = None,
    marks: Sequence[float] = (),
) -> Html:
    """Return stacked areas: name, colour and values of each layer, bottom first; `phases` has the phase of each x.

    `line` is the colour and the values of a line above them, `marks` are the x of vertical lines.
    """
    totals = [sum(values) for values in zip(*(layer for *_, layer in layers), strict=True)]
    highest = max([*totals, *(line[1] if line else ())])
    x_range, y_ticks = (x_values[0], x_values[-1]), _ticks(0.0, highest)
    y_range = (0.0, max(highest, y_ticks[-1]))
    lower, inner = [0.0] * len(x_values), []
    for name, color, values in layers:
        upper = [below + value for below, value in zip(lower, values, strict=True)]
        edge = [*zip(x_values, upper, strict=True), *reversed(list(zip(x_values, lower, strict=True)))]
        path = _path(edge, x_range, y_range)
        inner.append(html('<polygon points="{}" fill="{}"><title>{}</title></polygon>', path, color, name))
        lower = upper
    if line:
        path = _path(zip(x_values, line[1], strict=True), x_range, y_range)
        inner.append(html('<polyline points="{}" stroke="{}"/>', path, line[0]))
    names = []
    starts = [0, *(k for k in range(1, len(phases)) if phases[k] != phases[k - 1])]
    for start, end in zip(starts, [*starts[1:], len(phases) - 1], strict=True):
        left, right = (100 * _place(x_values[k], x_range) for k in (start, end))
        names.append(html('<line x1="{0:.2f}%" x2="{0:.2f}%" y1="0" y2="100%" class="phase"/>', left))
        if right - left > NAMED_SHARE:
            middle = (left + right) / 2
            names.append(html('<text x="{:.2f}%" y="-6" class="middle">{}</text>', middle, phases[start]))
    for x in marks:
        mark = '<line x1="{0:.2f}%" x2="{0:.2f}%" y1="0" y2="100%" class="capacity"/>'
        names.append(html(mark, 100 * _place(x, x_range)))
    parts = [*_axes(x_range, y_range, y_ticks, x_label), _stretched(inner), *names]
    return _svg(parts, title, LINE_HEIGHT, "plot")


def _svg(parts: Iterable[Html], title: str, height: int, kind: str) -> Html:
    """Return the picture; its title is read out by screen readers."""
    start = html('<svg class="{}" role="img" aria-label="{}" width="100%" height="{}">', kind, title, height)
    return joined([start, joined(parts, "\n"), Html("</svg>")])


def _stretched(parts: Iterable[Html]) -> Html:
    """Return shapes in coordinates from 0 to `SCALE`, stretched to the picture with lines of constant width."""
    box = f'viewBox="0 0 {SCALE} {SCALE}" preserveAspectRatio="none"'
    return joined([Html(f'<svg {box} width="100%" height="100%">'), joined(parts, "\n"), Html("</svg>")])


def _rectangle(left: float, top: int, width: float, height: int, color: str, name: str) -> Html:
    """Return a rectangle; left and width are shares of the picture."""
    text = '<rect x="{:.2f}%" y="{}" width="{:.2f}%" height="{}" fill="{}"><title>{}</title></rect>'
    return html(text, 100 * left, top, 100 * width, height, color, name)


def _axes(
    x_range: tuple[float, float], y_range: tuple[float, float], y_ticks: Sequence[float], x_label: str
) -> list[Html]:
    """Return lines and labels of the y ticks, the ends of the x axis and its label."""
    parts = []
    for tick in y_ticks:
        y = f"{100 * (1 - _place(tick, y_range)):.2f}%"
        parts.append(html('<line x1="0" x2="100%" y1="{0}" y2="{0}" class="grid"/>', y))
        parts.append(html('<text x="-6" y="{}" dy="4" class="end">{:.4g}</text>', y, tick))
    for x, style, text in ((0, "", f"{x_range[0]:g}"), (50, "middle", x_label), (100, "end", f"{x_range[1]:g}")):
        parts.append(html('<text x="{}%" y="100%" dy="17" class="{}">{}</text>', x, style, text))
    return parts


def _path(points: Iterable[tuple[float, float]], x_range: tuple[float, float], y_range: tuple[float, float]) -> str:
    """Return points in the coordinates of `_stretched`."""
    places = ((_place(x, x_range), 1 - _place(y, y_range)) for x, y in points)
    return " ".join(f"{SCALE * x:.0f},{SCALE * y:.0f}" for x, y in places)


def _place(value: float, limits: tuple[float, float]) -> float:
    """Return the position of a value in a range, from 0 to 1; 0 if the range is a point."""
    low, high = limits
    return 0.0 if high == low else (value - low) / (high - low)


def _ticks(low: float, high: float) -> list[float]:
    """Return about `TICKS` round values that span a range."""
    rough = (high - low) / TICKS or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(factor for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    return [round(step * k, 12) for k in range(math.floor(low / step), math.ceil(high / step) + 1)]


def _reduced(line: Line) -> list[tuple[float, float]]:
    """Return at most `MOST_POINTS` points of a line, each standing for equally many."""
    count = math.ceil(len(line.points) / MOST_POINTS)
    groups = [line.points[start : start + count] for start in range(0, len(line.points), count)]
    return [(group[0][0], line.reduce(y for _, y in group)) for group in groups]


def swatch(color: str) -> Html:
    """Return a square of a colour, for legends."""
    text = '<svg class="swatch" aria-hidden="true"><rect width="100%" height="100%" fill="{}"/></svg>'
    return html(text, color)


def figure(picture: Picture) -> Html:
    """A picture with its title, its legend and its note."""
    legend = joined(html("<span>{} {}</span> ", swatch(color), text) for color, text in picture.legend)
    note = html('<p class="note">{}</p>', picture.note) if picture.note else ""
    parts = '<figure>\n<figcaption>{}</figcaption>\n{}\n<p class="legend">{}</p>\n{}</figure>\n'
    return html(parts, picture.title, picture.svg, legend, note)


def step_lines(title: str, lines: Sequence[Line], note: str = "", *, from_zero: bool = True) -> Picture:
    """A chart of lines over optimizer steps."""
    legend = [(line.color, line.name) for line in lines if line.points]
    return Picture(title, line_chart(lines, title=title, x_label="optimizer step", from_zero=from_zero), legend, note)


def memory_lines(title: str, lines: Sequence[tuple[str, str, Sequence[tuple[int, float]]]], note: str) -> Picture:
    """Bytes over optimizer steps in their best unit; name, series and points of each line."""
    divisor, unit = reading_unit(round(max(count for *_, points in lines for _, count in points)))
    drawn = [
        Line(
            name=name,
            color=SERIES_COLORS[series],
            points=[(step, count / divisor) for step, count in points],
            dashed=series == "predicted",
            dots=series == "measured",
        )
        for name, series, points in lines
    ]
    return step_lines(f"{title}, {unit}", drawn, note)
