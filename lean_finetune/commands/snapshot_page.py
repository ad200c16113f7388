"""The page and the picture of `lean-finetune snapshot`: each one file without scripts or links to other files."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lean_finetune.commands.snapshot_text import (
    CATEGORY_NAMES,
    MEANINGS,
    NOT_REPLAYED,
    instant_text,
    not_replayed,
    on_card_text,
    parts_text,
    replay_notes,
    saving_text,
    smallest_gpus,
    steps_text,
    verdict_text,
    why_it_failed,
)
from lean_finetune.core.atomic_files import write_text
from lean_finetune.core.errors import UserError
from lean_finetune.core.units import counted, readable_size, reading_unit
from lean_finetune.memory.diagnosis.analysis import Analysis
from lean_finetune.memory.diagnosis.timeline import Timeline
from lean_finetune.memory.gpus import Device
from lean_finetune.memory.growth import LIVE, PEAK, RESERVED
from lean_finetune.memory.recording.what_if import Outcome, WhatIf
from lean_finetune.report.charts import Bar, area_chart, bar_chart
from lean_finetune.report.colors import RECORDED_COLORS, SERIES_COLORS
from lean_finetune.report.content import Result, Table
from lean_finetune.report.html_page import rendered
from lean_finetune.report.pictures import SWITCH_LEGEND, Picture, memory_lines

MOST_POINTS = 500
"""Instants of the timeline that are drawn."""
MOST_PLACES, MOST_STEPS = 20, 12
"""Rows of a table; steps whose bounds are drawn."""
STEP_LINES = (
    ("peak of a step", "measured", PEAK),
    ("live tensors after a step", "live", LIVE),
    ("reserved after a step", "reserved", RESERVED),
)
"""Name, series and column of each line."""


def write_page(
    path: Path, analysis: Analysis, replays: WhatIf | str, card: Device | None, on_card: Outcome | None
) -> None:
    """Write the page about a recording; arguments as `snapshot_lines`.

    Raises:
        UserError: the file cannot be written.
    """
    recording, peak, steps = analysis.recording, analysis.peak, analysis.steps
    places = [
        (each.where, readable_size(each.bytes), each.blocks, ", ".join(map(_name, each.categories)))
        for each in peak.lines
    ]
    largest = [(where, readable_size(size), count, _name(category)) for where, category, size, count in peak.largest]
    grown = [(where, readable_size(size), blocks) for where, size, blocks in steps.grown]
    page = rendered(
        "snapshot.html",
        analysis=analysis,
        events=counted(len(recording.events), "event"),
        verdict=verdict_text(analysis),
        why=[why_it_failed(failure, len(analysis.failures)) for failure in analysis.failures[-1:]],
        results=_results(analysis, replays),
        timeline=timeline_picture(analysis) if recording.events else None,
        peak=_peak_picture(analysis) if peak.allocated_bytes else None,
        meanings=[f"{_name(name)}: {MEANINGS[name]}" for name in peak.by_category if name in MEANINGS],
        places=Table(("line of code", "bytes", "tensors", "category"), places[:MOST_PLACES]),
        largest=Table(("largest tensors", "bytes of each", "tensors", "category"), largest),
        replays=_replays_picture(analysis, replays) if isinstance(replays, WhatIf) else None,
        replay_notes=list(_replay_notes(analysis, replays)),
        on_card=None if card is None else f"On {card.name}: {on_card_text(recording, card, on_card)}",
        steps=_steps_picture(analysis) if len(steps.rows) > 1 else None,
        steps_text=steps_text(steps),
        grown=Table(("more live after the last step than after the first", "bytes", "tensors"), grown[:MOST_PLACES]),
        remedies=[(f"{saving_text(each)} ({parts_text(each)})", each.remedy) for each in analysis.remedies],
        sentence=lambda text: f"{text[:1].upper()}{text[1:]}.",
    )
    write_text(path, page)


def write_picture(path: Path, analysis: Analysis) -> None:
    """Write the timeline as an SVG file.

    Raises:
        UserError: nothing was recorded, or the file cannot be written.
    """
    if not analysis.recording.events:
        raise UserError("--picture: draws events, and the snapshot has none; call _record_memory_history before it")
    picture = timeline_picture(analysis)
    title = f"{analysis.recording.name}: {picture.title[:1].lower()}{picture.title[1:]}"
    write_text(path, rendered("picture.svg", picture=picture._replace(title=title)))


def _name(category: str) -> str:
    return CATEGORY_NAMES.get(category, category)


def _results(analysis: Analysis, replays: WhatIf | str) -> list[Result]:
    """The most important figures."""
    peak = analysis.peak
    unused = readable_size(max(0, peak.reserved_bytes - peak.allocated_bytes))
    found = [
        Result("Tensors", readable_size(peak.allocated_bytes), instant_text(analysis)),
        Result(
            "Reserved at most", readable_size(analysis.reserved_peak_bytes), f"{unused} unused {instant_text(analysis)}"
        ),
    ]
    if isinstance(replays, WhatIf):
        found.append(Result("Smallest known GPU", smallest_gpus(replays), "by memory alone, replayed"))
    return found


def drawn_instants(timeline: Timeline) -> tuple[np.ndarray, np.ndarray]:
    """Return the instants to draw, and the reserved bytes to draw there, so that the peaks of both are among them.

    The events are divided into at most `MOST_POINTS` equal parts. Each draws its fullest instant, with the most that is
    reserved in the part; the beginning and the end are added.
    """
    allocated_E, reserved_E = timeline.allocated_E, timeline.reserved_E
    length = -(-len(allocated_E) // MOST_POINTS)
    starts = np.arange(0, len(allocated_E), length)
    fullest = [start + int(np.argmax(allocated_E[start : start + length])) for start in starts]
    instants = np.array([0, *fullest, len(allocated_E) - 1])
    return instants, np.array([reserved_E[0], *np.maximum.reduceat(reserved_E, starts), reserved_E[-1]])


def timeline_picture(analysis: Analysis) -> Picture:
    """Live bytes by category and reserved bytes over the events, with the failed requests."""
    timeline, begins = analysis.timeline, analysis.steps.begins
    instants, reserved = drawn_instants(timeline)
    by_category = {str(name): live for name, live in timeline.by_category().items()}
    divisor, unit = reading_unit(int(reserved.max()))
    layers = [
        (_name(category), color, (by_category[category][instants] / divisor).tolist())
        for category, color in RECORDED_COLORS.items()
        if category in by_category
    ]
    steps = np.searchsorted(begins, instants, side="right") if len(begins) <= MOST_STEPS else np.zeros_like(instants)
    title = f"Live memory by category, and reserved memory, {unit}"
    svg = area_chart(
        instants.tolist(),
        layers,
        [f"step {step - 1}" if step else "" for step in steps],
        title=title,
        x_label="events of the allocator",
        line=(SERIES_COLORS["reserved"], (reserved / divisor).tolist()),
        marks=[failure.event for failure in analysis.failures],
    )
    legend = [(color, name) for name, color, _ in layers] + [(SERIES_COLORS["reserved"], "reserved (line)")]
    return Picture(title, svg, legend, "Dashed red line: a request failed." if analysis.failures else "")


def _peak_picture(analysis: Analysis) -> Picture:
    """The categories at the instant of interest, largest first."""
    peak = analysis.peak
    bars = [
        Bar(
            label=_name(category),
            text=f"{readable_size(size)}, {100 * size / peak.allocated_bytes:.1f} %",
            segments=[(_name(category), RECORDED_COLORS[category], size)],
        )
        for category, size in peak.by_category.items()
    ]
    title = f"Tensors {instant_text(analysis)}, by category"
    return Picture(title, bar_chart(bars, title=title), [])


def _replays_picture(analysis: Analysis, replays: WhatIf) -> Picture:
    """Reserved memory under other settings, beside the recorded one."""
    recorded, *others = replays.outcomes
    size = analysis.reserved_peak_bytes
    title = "Reserved at most, replayed with other settings of the allocator"
    segment = (recorded.name, SERIES_COLORS["current"], size)
    bars = [Bar(label=recorded.name, text=readable_size(size), segments=[segment], strong=True)]
    for outcome in others:
        less = analysis.baseline_bytes(replays) - outcome.peak_reserved_bytes
        change = f", {readable_size(abs(less))} {'less' if less > 0 else 'more'}" if less else ""
        segment = (outcome.name, SERIES_COLORS["saves" if less > 0 else "costs"], outcome.peak_reserved_bytes)
        text = readable_size(outcome.peak_reserved_bytes) + change + (", fails" if outcome.why else "")
        bars.append(Bar(label=outcome.name, text=text, segments=[segment]))
    legend = [(SERIES_COLORS[name], text) for name, text in (SWITCH_LEGEND | {"current": "as recorded"}).items()]
    return Picture(title, bar_chart(bars, title=title), legend)


def _replay_notes(analysis: Analysis, replays: WhatIf | str) -> Iterator[str]:
    """What failed in a replay, and what was not replayed."""
    if isinstance(replays, str):
        yield f"{NOT_REPLAYED}: {replays}"
        return
    yield from (f"{outcome.name} fails: {outcome.why}" for outcome in replays.outcomes if outcome.why)
    yield from (f"Not replayed: {reason}" for reason in not_replayed(replays))
    yield from (f"Note: {note}" for note in replay_notes(analysis, replays))


def _steps_picture(analysis: Analysis) -> Picture:
    """Memory of each training step."""
    rows = analysis.steps.rows
    lines = [(name, series, [(row["step"], row[column]) for row in rows]) for name, series, column in STEP_LINES]
    return memory_lines("Memory over training steps", lines, "")
