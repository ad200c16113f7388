"""Draw charts as inline SVG: widths in percent, so that text keeps its size on a phone and on a desktop.

Text, axes and the capacity take their colours from the page's style sheet, which has a light and a dark theme.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

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


def bar_chart(bars: Sequence[Bar], *, title: str, capacity: float | None = None) -> Markup:
    """Return horizontal bars from zero, with a dashed line at `capacity`."""
    longest = max(max(sum(size for *_, size in bar.segments), bar.thin[2] if bar.thin else 0.0) for bar in bars)
    limit = max(longest, capacity or 0.0) or 1.0
    parts = []
    for number, bar in enumerate(bars):
        top, start = number * BAR_ROW, 0.0
        style = Markup(' class="strong"') if bar.strong else ""
        parts.append(Markup('<text x="0" y="{}"{}>{}</text>').format(top + 13, style, bar.label))
        parts.append(Markup('<text x="100%" y="{}" class="end">{}</text>').format(top + 13, bar.text))
        for name, color, size in bar.segments:
            parts.append(_rectangle(start / limit, top + 19, size / limit, 13, color, name))
            start += size
        if bar.thin is not None:
            name, color, size = bar.thin
            parts.append(_rectangle(0.0, top + 33, size / limit, 5, color, name))
        if capacity is not None:
            line = Markup('<line x1="{0:.2f}%" x2="{0:.2f}%" y1="{1}" y2="{2}" class="capacity"/>')
            parts.append(line.format(100 * capacity / limit, top + 17, top + 41))
    return _svg(parts, title, len(bars) * BAR_ROW, "bars")


def line_chart(lines: Sequence[Line], *, title: str, x_label: str, from_zero: bool = True) -> Markup:
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
        dash = Markup(' class="dashed"') if line.dashed else ""
        inner.append(Markup('<polyline points="{}" stroke="{}"{}/>').format(path, line.color, dash))
        if line.dots or len(places) == 1:
            dots += [
                Markup('<circle cx="{:.2f}%" cy="{:.2f}%" r="3" fill="{}"/>').format(100 * x, 100 * y, line.color)
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
) -> Markup:
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
        inner.append(Markup('<polygon points="{}" fill="{}"><title>{}</title></polygon>').format(path, color, name))
        lower = upper
    if line:
        path = _path(zip(x_values, line[1], strict=True), x_range, y_range)
        inner.append(Markup('<polyline points="{}" stroke="{}"/>').format(path, line[0]))
    names = []
    starts = [0, *(k for k in range(1, len(phases)) if phases[k] != phases[k - 1])]
    for start, end in zip(starts, [*starts[1:], len(phases) - 1], strict=True):
        left, right = (100 * _place(x_values[k], x_range) for k in (start, end))
        names.append(Markup('<line x1="{0:.2f}%" x2="{0:.2f}%" y1="0" y2="100%" class="phase"/>').format(left))
        if right - left > NAMED_SHARE:
            middle = (left + right) / 2
            names.append(Markup('<text x="{:.2f}%" y="-6" class="middle">{}</text>').format(middle, phases[start]))
    for x in marks:
        mark = Markup('<line x1="{0:.2f}%" x2="{0:.2f}%" y1="0" y2="100%" class="capacity"/>')
        names.append(mark.format(100 * _place(x, x_range)))
    parts = [*_axes(x_range, y_range, y_ticks, x_label), _stretched(inner), *names]
    return _svg(parts, title, LINE_HEIGHT, "plot")


def _svg(parts: Iterable[str], title: str, height: int, kind: str) -> Markup:
    """Return the picture; its title is read out by screen readers."""
    start = Markup('<svg class="{}" role="img" aria-label="{}" width="100%" height="{}">').format(kind, title, height)
    return start + Markup("\n").join(parts) + Markup("</svg>")


def _stretched(parts: Iterable[Markup]) -> Markup:
    """Return shapes in coordinates from 0 to `SCALE`, stretched to the picture with lines of constant width."""
    box = f'viewBox="0 0 {SCALE} {SCALE}" preserveAspectRatio="none"'
    return Markup(f'<svg {box} width="100%" height="100%">') + Markup("\n").join(parts) + Markup("</svg>")


def _rectangle(left: float, top: int, width: float, height: int, color: str, name: str) -> Markup:
    """Return a rectangle; left and width are shares of the picture."""
    text = '<rect x="{:.2f}%" y="{}" width="{:.2f}%" height="{}" fill="{}"><title>{}</title></rect>'
    return Markup(text).format(100 * left, top, 100 * width, height, color, name)


def _axes(
    x_range: tuple[float, float], y_range: tuple[float, float], y_ticks: Sequence[float], x_label: str
) -> list[Markup]:
    """Return lines and labels of the y ticks, the ends of the x axis and its label."""
    parts = []
    for tick in y_ticks:
        y = f"{100 * (1 - _place(tick, y_range)):.2f}%"
        parts.append(Markup('<line x1="0" x2="100%" y1="{0}" y2="{0}" class="grid"/>').format(y))
        parts.append(Markup('<text x="-6" y="{}" dy="4" class="end">{:.4g}</text>').format(y, tick))
    for x, style, text in ((0, "", f"{x_range[0]:g}"), (50, "middle", x_label), (100, "end", f"{x_range[1]:g}")):
        parts.append(Markup('<text x="{}%" y="100%" dy="17" class="{}">{}</text>').format(x, style, text))
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


def swatch(color: str) -> Markup:
    """Return a square of a colour, for legends."""
    text = '<svg class="swatch" aria-hidden="true"><rect width="100%" height="100%" fill="{}"/></svg>'
    return Markup(text).format(color)
