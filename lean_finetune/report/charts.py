"""The charts of report.html, each with its legend."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from cuda_memory.page.charts import (
    SERIES_COLORS,
    SWITCH_LEGEND,
    Bar,
    Line,
    Picture,
    area_chart,
    bar_chart,
    memory_lines,
    step_lines,
)
from cuda_memory.units import GIB, reading_unit, significant
from lean_finetune.report.content import CPU, plan_note, switches
from lean_finetune.report.formats import size
from lean_finetune.report.report_inputs import Inputs, in_order

Curves = Sequence[Mapping[str, str]]
"""Lines of curves.csv, one for each optimizer step, at least one."""
CAPACITY_TIMES = 5
"""Most times the predicted peak at which the capacity is drawn."""
CATEGORY_COLORS = {
    "weights": "#4c78a8",
    "quantisation_state": "#8fb8de",
    "adapters": "#2a9d8f",
    "optimizer": "#8a6bbe",
    "gradients": "#c05a9a",
    "workspace": "#8d8d8d",
    "sharding": "#5f7f7f",
    "inputs": "#a9a13c",
    "activations": "#e08a3c",
    "logits": "#d1495b",
    "activation_gradients": "#e6c229",
    "update": "#9a6b4f",
    "kv_cache": "#5aa86a",
}
"""Colour of each category of memory, from the most persistent to the most temporary."""


def charts(inputs: Inputs) -> dict[str, Picture]:
    """Return the charts by name; `reserved` exists only for a GPU whose plan was replayed, the last two for pairs."""
    curves = inputs.curves
    found = {
        "phases": _phases(inputs),
        "steps": memory_chart(
            curves,
            inputs.estimate["peak_bytes_predicted"],
            on_gpu=inputs.train["device"] != CPU,
            note=f"{inputs.train['growth']['summary']}.",
        ),
        "timeline": _timeline(inputs),
        "switches": _switches(inputs),
        "loss": loss_chart(curves),
    }
    if _is_paired(curves):
        found["accuracy"] = _by_step(curves, "Share of pairs in the right order", "reward_accuracy")
        found["margin"] = _by_step(curves, "Mean margin between the rewards of a pair", "reward_margin")
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
    note += f"The predicted peak is {significant(share, 3)} % of it."
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


def memory_chart(curves: Curves, peak_bytes: int | None, *, on_gpu: bool, note: str) -> Picture:
    """Memory over optimizer steps; on a CPU the peaks only, because malloc counts all of Python's memory.

    `peak_bytes` is the predicted peak; None if it is not known, but a step was measured.
    """
    lines = [("measured peak of a step", "measured", _curve(curves, "allocated_bytes"))]
    if peak_bytes is not None:
        ends = [(int(curves[place]["step"]), float(peak_bytes)) for place in (0, -1)]
        lines.insert(0, ("predicted peak of the run", "predicted", ends))
    if on_gpu:
        lines.append(("live tensors after a step", "live", _curve(curves, "live_bytes")))
        lines.append(("reserved after a step", "reserved", _curve(curves, "reserved_bytes")))
    return memory_lines("Memory over optimizer steps", lines, note)


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


def loss_chart(curves: Curves) -> Picture:
    """The loss of training and of the held-out rows over optimizer steps."""
    of_pairs = "Loss, mean over the pairs of a step"
    return _by_step(curves, of_pairs if _is_paired(curves) else "Loss, nats per trained token", "loss")


def _is_paired(curves: Curves) -> bool:
    return any(record.get("reward_accuracy") for record in curves)


def _curve(curves: Curves, column: str) -> list[tuple[int, float]]:
    """Steps and values of a column of the curves, without empty cells."""
    return [(int(record["step"]), float(record[column])) for record in curves if record.get(column)]


def _by_step(curves: Curves, title: str, column: str) -> Picture:
    """A figure of training and of the held-out rows over optimizer steps."""
    training, heldout = (_curve(curves, name) for name in (column, f"heldout_{column}"))
    lines = [
        Line(name="training", color=SERIES_COLORS["training"], points=training, reduce=fmean),
        Line(name="held out", color=SERIES_COLORS["heldout"], points=heldout, dots=True, reduce=fmean),
    ]
    return step_lines(title, lines, from_zero=False)


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
