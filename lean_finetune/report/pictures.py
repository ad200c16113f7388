"""The pictures of report.html, each with its legend."""

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from markupsafe import Markup

from lean_finetune.core.units import GIB, reading_unit
from lean_finetune.report.charts import Bar, Line, area_chart, bar_chart, line_chart
from lean_finetune.report.colors import CATEGORY_COLORS, SERIES_COLORS
from lean_finetune.report.content import plan_note, size, switches
from lean_finetune.report.report_figures import CPU
from lean_finetune.report.report_inputs import Inputs, in_order

CAPACITY_TIMES = 5
"""Most times the predicted peak at which the capacity is drawn."""
SWITCH_LEGEND = {"saves": "needs less", "current": "this run", "costs": "needs more, or the same"}


class Picture(NamedTuple):
    """A chart with its caption."""

    title: str
    svg: Markup
    legend: list[tuple[str, str]]
    """Colour and name of each series."""
    note: str = ""


def pictures(inputs: Inputs) -> dict[str, Picture]:
    """Return the pictures by name; `reserved` exists only for a GPU whose plan was replayed."""
    found = {
        "phases": _phases(inputs),
        "steps": _steps(inputs),
        "timeline": _timeline(inputs),
        "switches": _switches(inputs),
        "loss": _loss(inputs),
    }
    if inputs.reserved:
        found["reserved"] = _reserved(inputs)
    return found


def _phases(inputs: Inputs) -> Picture:
    """Predicted bytes of each phase by category, above its measured peak, and the capacity of the device."""
    measured, bars = inputs.train["measured_by_phase"], []
    phases = in_order({phase: None for phase in inputs.breakdown if phase != "peak"})
    for phase in phases:
        parts = _parts(inputs, phase)
        segments = [(f"{_words(name)} {size(count)}", CATEGORY_COLORS[name], count) for name, count in parts]
        seen = measured.get(phase)
        text = size(sum(count for _, count in parts))
        thin = None if seen is None else ("measured", SERIES_COLORS["measured"], seen)
        text += "" if seen is None else f", measured {size(seen)}"
        bars.append(Bar(label=phase, text=text, segments=segments, thin=thin))
    used = {name for phase in phases for name, _ in _parts(inputs, phase)}
    legend = [(color, _words(name)) for name, color in CATEGORY_COLORS.items() if name in used]
    legend.append((SERIES_COLORS["measured"], "measured (thin bar)"))
    estimate, capacity = inputs.estimate, _capacity(inputs)
    share = 100 * estimate["peak_bytes_predicted"] / (estimate["capacity_gib"] * GIB)
    place = "too large for this scale" if capacity is None else "dashed line"
    note = f"Capacity of {estimate['gpu']} ({place}): {estimate['capacity_gib']:.4g} GiB. "
    note += f"The predicted peak is {share:.3g} % of it."
    title = "Predicted peak of each phase by category, and the measured peak"
    return Picture(title, bar_chart(bars, title=title, capacity=capacity), legend, note)


def _capacity(inputs: Inputs) -> float | None:
    """Bytes of the device; None if they are so many that the bars beside them would be too short."""
    capacity = inputs.estimate["capacity_gib"] * GIB
    return capacity if capacity <= CAPACITY_TIMES * inputs.estimate["peak_bytes_predicted"] else None


def _parts(inputs: Inputs, phase: str) -> list[tuple[str, int]]:
    """Categories of a phase that have bytes, from the most persistent to the most temporary."""
    found = inputs.breakdown[phase]
    return [(name, found[name]) for name in CATEGORY_COLORS if found.get(name)]


def _words(name: str) -> str:
    """The name of a category as words."""
    return name.replace("_", " ")


def _steps(inputs: Inputs) -> Picture:
    """Memory over optimizer steps; on a CPU the peaks only, because malloc counts all of Python's memory."""
    peak_bytes = inputs.estimate["peak_bytes_predicted"]
    steps = [int(record["step"]) for record in inputs.curves]
    lines = [
        ("predicted peak of the run", "predicted", [(steps[0], float(peak_bytes)), (steps[-1], float(peak_bytes))]),
        ("measured peak of a step", "measured", _curve(inputs, "allocated_bytes")),
    ]
    if inputs.train["device"] != CPU:
        lines.append(("live tensors after a step", "live", _curve(inputs, "live_bytes")))
        lines.append(("reserved after a step", "reserved", _curve(inputs, "reserved_bytes")))
    return memory_lines("Memory over optimizer steps", lines, f"{inputs.train['growth']['summary']}.")


def _reserved(inputs: Inputs) -> Picture:
    """Predicted memory of tensors and reserved memory by optimizer step."""
    names = {
        "reserved_gib": ("reserved, fixed segments", "reserved"),
        "reserved_expandable_gib": ("reserved, expandable segments", "expandable"),
        "allocated_gib": ("tensors", "live"),
    }
    lines = [
        (name, series, [(int(record["step"]), float(record[column]) * GIB) for record in inputs.reserved])
        for column, (name, series) in names.items()
    ]
    return memory_lines("Predicted memory of the plan, step by step", lines, plan_note(inputs))


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
    return _lines(f"{title}, {unit}", drawn, note)


def _lines(title: str, lines: Sequence[Line], note: str = "", *, from_zero: bool = True) -> Picture:
    """A chart of lines over optimizer steps."""
    legend = [(line.color, line.name) for line in lines if line.points]
    return Picture(title, line_chart(lines, title=title, x_label="optimizer step", from_zero=from_zero), legend, note)


def _curve(inputs: Inputs, column: str) -> list[tuple[int, float]]:
    """Steps and values of a column of the curves, without empty cells."""
    return [(int(record["step"]), float(record[column])) for record in inputs.curves if record[column]]


def _loss(inputs: Inputs) -> Picture:
    """Training and held-out loss over optimizer steps."""
    training, heldout = (_curve(inputs, column) for column in ("loss", "heldout_loss"))
    lines = [
        Line(name="training", color=SERIES_COLORS["training"], points=training, reduce=fmean),
        Line(name="held out", color=SERIES_COLORS["heldout"], points=heldout, dots=True, reduce=fmean),
    ]
    return _lines("Loss, nats per trained token", lines, from_zero=False)


def _timeline(inputs: Inputs) -> Picture:
    """Predicted bytes by category over the allocations of the worst step, with its phases."""
    records = inputs.timeline
    sizes = {name: [float(record[name]) * GIB for record in records] for name in CATEGORY_COLORS if name in records[0]}
    sizes = {name: counts for name, counts in sizes.items() if max(counts) > 0}
    divisor, unit = reading_unit(round(max(map(sum, zip(*sizes.values(), strict=True)))))
    layers = [
        (_words(name), CATEGORY_COLORS[name], [count / divisor for count in counts]) for name, counts in sizes.items()
    ]
    title = f"Predicted memory up to the end of the worst step, {unit}"
    events, phases = [int(record["event"]) for record in records], [record["phase"] for record in records]
    svg = area_chart(events, layers, phases, title=title, x_label="allocations and frees")
    return Picture(title, svg, [(color, name) for name, color, _ in layers])


def _switches(inputs: Inputs) -> Picture:
    """Predicted peak of the run, marked, and after changing one switch; what saves most comes first."""
    bars = []
    for name, peak, saved in switches(inputs):
        series = "current" if name == "current" else "saves" if saved > 0 else "costs"
        change = "" if series == "current" else f", {'saves' if saved > 0 else 'costs'} {size(abs(saved))}"
        label = "this run" if series == "current" else name
        segment = (label, SERIES_COLORS[series], peak)
        bars.append(Bar(label=label, text=size(peak) + change, segments=[segment], strong=series == "current"))
    title = "Predicted peak after changing one switch"
    legend = [(SERIES_COLORS[name], text) for name, text in SWITCH_LEGEND.items()]
    return Picture(title, bar_chart(bars, title=title, capacity=_capacity(inputs)), legend)
