"""Draw the plots of the report as PNG; equal figures give equal bytes."""

from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lean_finetune.core.units import GIB, reading_unit
from lean_finetune.report.report_inputs import Inputs, in_order

DOTS_PER_INCH = 120
WIDTH_INCHES = 8.0
PALETTE = colormaps["tab20"].colors  # type: ignore[attr-defined]
COLORS = [*PALETTE[::2], *PALETTE[1::2]]
"""Dark colours first, then their light variants."""
NAMED_SHARE = 0.08
"""Least share of a plot's width that fits the name of a phase."""


def draw(directory: Path, inputs: Inputs) -> None:
    """Write memory.png, timeline.png, switches.png, loss.png and, for a GPU, reserved.png."""
    _save(directory / "memory.png", 3.6, lambda axes: _memory(axes, inputs))
    _save(directory / "timeline.png", 3.6, lambda axes: _timeline(axes, inputs))
    _save(directory / "switches.png", 1.2 + 0.3 * len(inputs.switches), lambda axes: _switches(axes, inputs))
    if inputs.reserved[0]["reserved_gib"]:
        _save(directory / "reserved.png", 3.6, lambda axes: _reserved(axes, inputs))
    _save(directory / "loss.png", 3.6, lambda axes: _loss(axes, inputs))


def _save(path: Path, height_inches: float, plot: Any) -> None:
    """Draw one figure, without the version of matplotlib in its metadata."""
    figure = Figure(figsize=(WIDTH_INCHES, height_inches), dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    plot(axes)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Software": None})


def _memory(axes: Axes, inputs: Inputs) -> None:
    """Predicted bytes of each phase by category, with measured peaks as marks."""
    phases = in_order({phase: None for phase in inputs.breakdown if phase != "peak"})
    divisor, unit = reading_unit(inputs.estimate["peak_bytes_predicted"])
    largest: dict[str, int] = {}
    for phase in phases:
        for category, count in inputs.breakdown[phase].items():
            largest[category] = max(largest.get(category, 0), count)
    left = [0.0] * len(phases)
    for number, category in enumerate(sorted(largest, key=lambda name: (-largest[name], name))):
        width = [inputs.breakdown[phase].get(category, 0) / divisor for phase in phases]
        color = COLORS[number % len(COLORS)]
        axes.barh(phases, width, left=left, label=category.replace("_", " "), height=0.6, color=color)
        left = [start + size for start, size in zip(left, width, strict=True)]
    measured = {p: b / divisor for p, b in inputs.train["measured_by_phase"].items() if b is not None and p in phases}
    if measured:
        axes.plot(list(measured.values()), list(measured), "k|", ms=22, mew=2, label="measured")
    axes.invert_yaxis()
    axes.set(xlabel=unit, xlim=(0, None), title="Peak memory of each phase: predicted by category, and measured")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize="small", markerscale=0.4)


def _timeline(axes: Axes, inputs: Inputs) -> None:
    """Predicted bytes by category over the allocations of the worst step, with its phases."""
    records = inputs.timeline
    events = [int(record["event"]) for record in records]
    sizes = {
        name: [float(record[name]) * GIB for record in records] for name in records[0] if name not in ("event", "phase")
    }
    shown = {name: size for name, size in sizes.items() if max(size) > 0}
    divisor, unit = reading_unit(round(max(map(sum, zip(*shown.values(), strict=True)))))
    layers = [[size / divisor for size in shown[name]] for name in shown]
    axes.stackplot(events, layers, labels=[name.replace("_", " ") for name in shown], colors=COLORS, lw=0)
    _name_phases(axes, events, [record["phase"] for record in records])
    axes.set(xlabel="allocations and frees", ylabel=unit)
    axes.set_title("Predicted memory up to the end of the worst step, by category", pad=18)
    axes.margins(x=0)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize="small", reverse=True)


def _name_phases(axes: Axes, events: list[int], phases: list[str]) -> None:
    """Draw a line at the end of each phase, and the names of phases that are wide enough."""
    starts = [0, *(k for k in range(1, len(phases)) if phases[k] != phases[k - 1])]
    for start, end in zip(starts, [*starts[1:], len(phases) - 1], strict=True):
        if start:
            axes.axvline(events[start], color="black", lw=0.5, ls=":")
        if events[end] - events[start] > NAMED_SHARE * (events[-1] - events[0]):
            middle = (events[start] + events[end]) / 2
            axes.text(middle, 1.02, phases[start], transform=axes.get_xaxis_transform(), ha="center", fontsize="small")


def _reserved(axes: Axes, inputs: Inputs) -> None:
    """Predicted memory of tensors and reserved memory by optimizer step."""
    steps = [int(record["step"]) for record in inputs.reserved]
    lines = {
        "reserved_gib": "reserved, fixed segments",
        "reserved_expandable_gib": "reserved, expandable segments",
        "allocated_gib": "tensors",
    }
    sizes = {name: [float(record[name]) * GIB for record in inputs.reserved] for name in lines}
    divisor, unit = reading_unit(round(max(map(max, sizes.values()))))
    for name, label in lines.items():
        axes.plot(steps, [size / divisor for size in sizes[name]], label=label, drawstyle="steps-post", lw=1.4)
    axes.set(xlabel="optimizer step", ylabel=unit, title="Predicted memory of the plan, step by step", ylim=(0, None))
    axes.legend(frameon=False)


def _switches(axes: Axes, inputs: Inputs) -> None:
    """Predicted peak of the run, and after changing one switch."""
    names = [record["switch"] for record in inputs.switches]
    peaks = [float(record["peak_gib"]) * GIB for record in inputs.switches]
    divisor, unit = reading_unit(round(max(peaks)))
    bars = axes.barh(names, [peak / divisor for peak in peaks], height=0.6)
    axes.bar_label(bars, fmt="%.3g", padding=3)
    axes.margins(x=0.12)
    axes.invert_yaxis()
    axes.set(xlabel=f"predicted peak, {unit}", title="What one switch would change")


def _loss(axes: Axes, inputs: Inputs) -> None:
    """Training and held-out loss over optimizer steps."""
    for column, style, label in (("loss", "-", "training"), ("heldout_loss", "o-", "held out")):
        known = [(int(record["step"]), float(record[column])) for record in inputs.curves if record[column]]
        if known:
            axes.plot(*zip(*known, strict=True), style, label=label, lw=1.2, ms=4)
    axes.set(xlabel="optimizer step", ylabel="loss, nats per trained token", title="Loss")
    axes.legend(frameon=False)
