"""The page and the picture of `lean-finetune snapshot`: each one file without scripts or links to other files."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from cuda_memory.diagnosis import Analysis
from cuda_memory.errors import UserError, write_whole
from cuda_memory.gpus import Device
from cuda_memory.growth import LIVE, PEAK, RESERVED
from cuda_memory.page.charts import (
    RECORDED_COLORS,
    SERIES_COLORS,
    SWITCH_LEGEND,
    Bar,
    Picture,
    area_chart,
    bar_chart,
    figure,
    memory_lines,
)
from cuda_memory.page.html import Html, Table, document, html, joined, table
from cuda_memory.remedies import Advice
from cuda_memory.snapshot_text import (
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
from cuda_memory.timeline import Timeline
from cuda_memory.units import counted, readable_size, reading_unit
from cuda_memory.what_if import Outcome, WhatIf

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
TABLE = "figures places"
PLACES_STYLE = (
    ".places td:first-child { overflow-wrap: anywhere; } "
    ".figures td:last-child, .figures th:last-child { padding-right: 0; }"
)
NO_EVENTS = "<p>No events were recorded. This is the memory when the snapshot was taken.</p>"
PICTURE_STYLE = (
    "svg { overflow: visible; } text { fill: #1c2128; font-size: 12px; } "
    ".end { text-anchor: end; } .middle { text-anchor: middle; }\n"
    ".title { font-size: 15px; } .grid { stroke: #d5dae0; } .phase { stroke: #59636e; stroke-dasharray: 2 3; }\n"
    ".capacity { stroke: #c0283a; stroke-width: 2; stroke-dasharray: 5 4; }\n"
    "polyline { stroke-width: 1.6; vector-effect: non-scaling-stroke; }"
)
PICTURE = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="1000" height="350" viewBox="0 0 1000 350" '
    'font-family="system-ui, sans-serif" fill="none">\n<style>\n{}\n</style>\n'
    '<rect width="1000" height="350" fill="#fff"/>\n<text x="20" y="26" class="title">{}</text>\n'
    '<svg x="60" y="52" width="915" height="220">{}</svg>\n{}</svg>'
)
"""Style, title, chart and legend of an SVG file."""
LEGEND = '<rect x="{}" y="{}" width="11" height="11" fill="{}"/><text x="{}" y="{}">{}</text>\n'


def write_page(
    path: Path, analysis: Analysis, replays: WhatIf | str, card: Device | None, on_card: Outcome | None
) -> None:
    """Write the page about a recording; arguments as `snapshot_lines`.

    Raises:
        UserError: the file cannot be written.
    """
    title = f"GPU memory: {analysis.recording.name}"
    write_whole(path, document(title, joined(_body(analysis, replays, card, on_card)), PLACES_STYLE))


def _body(analysis: Analysis, replays: WhatIf | str, card: Device | None, on_card: Outcome | None) -> Iterator[Html]:
    """The page from top to bottom."""
    recording, peak, steps = analysis.recording, analysis.peak, analysis.steps
    about = f"{recording.name}, device {recording.device}, {counted(len(recording.events), 'event')}"
    yield html('<header>\n<h1>GPU memory</h1>\n<p class="quiet">{}</p>\n</header>\n', about)
    kind = "bad" if analysis.failures else "good"
    yield html('<p class="verdict {}">{}</p>\n', kind, _sentence(verdict_text(analysis)))
    for failure in analysis.failures[-1:]:
        yield html("<p>{}</p>", _sentence(why_it_failed(failure, len(analysis.failures))))
    yield _notes(recording.notes)
    results = '<div><dt>{}</dt><dd class="value">{}</dd><dd class="quiet">{}</dd></div>\n'
    yield html(
        '<dl class="results">\n{}</dl>\n\n', joined(html(results, *each) for each in _results(analysis, replays))
    )

    yield Html("<h2>Timeline</h2>\n")
    yield figure(timeline_picture(analysis)) if recording.events else Html(NO_EVENTS)

    yield Html("\n<h2>What filled the memory</h2>\n")
    if peak.allocated_bytes:
        yield figure(_peak_picture(analysis))
    yield _notes(f"{_name(name)}: {MEANINGS[name]}" for name in peak.by_category if name in MEANINGS)
    places = [
        (each.where, readable_size(each.bytes), each.blocks, ", ".join(map(_name, each.categories)))
        for each in peak.lines[:MOST_PLACES]
    ]
    yield table(Table(("line of code", "bytes", "tensors", "category"), places), TABLE)
    largest = [(where, readable_size(size), count, _name(category)) for where, category, size, count in peak.largest]
    of_largest = table(Table(("largest tensors", "bytes of each", "tensors", "category"), largest), TABLE)
    yield html("\n<details><summary>The largest tensors</summary>\n{}\n</details>\n\n", of_largest)

    if analysis.remedies:
        remedies = joined(map(_remedy, analysis.remedies))
        yield html("<h2>What would help</h2>\n<ul>\n{}</ul>\n", remedies)

    yield Html("\n<h2>What if</h2>\n")
    if isinstance(replays, WhatIf):
        yield figure(_replays_picture(analysis, replays))
    if card is not None:
        yield html("<p>{}</p>", _sentence(f"On {card.name}: {on_card_text(recording, card, on_card)}"))
    yield _notes(_replay_notes(analysis, replays))

    yield html("\n<h2>From step to step</h2>\n<p>{}</p>\n", _sentence(steps_text(steps)))
    if len(steps.rows) > 1:
        lines = [
            (name, series, [(row["step"], row[column]) for row in steps.rows]) for name, series, column in STEP_LINES
        ]
        yield figure(memory_lines("Memory over training steps", lines, ""))
    if steps.grown:
        grown = [(where, readable_size(size), blocks) for where, size, blocks in steps.grown[:MOST_PLACES]]
        yield table(Table(("more live after the last step than after the first", "bytes", "tensors"), grown), TABLE)


def _notes(texts: Iterable[str]) -> Html:
    return joined(html('<p class="note">{}</p>', _sentence(text)) for text in texts)


def _remedy(advice: Advice) -> Html:
    """What a change saves, and its name here and in other tools."""
    saving = _sentence(f"{saving_text(advice)} ({parts_text(advice)})")[:-1]
    names = "; ".join(f"{tool}: {text}" for tool, text in advice.remedy.elsewhere.items())
    return html(
        '<li><strong>{}</strong>: {}.\n<span class="quiet">in lean-finetune: {}; {}</span></li>\n',
        saving,
        advice.remedy.effect,
        advice.remedy.ours,
        names,
    )


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def write_picture(path: Path, analysis: Analysis) -> None:
    """Write the timeline as an SVG file.

    Raises:
        UserError: nothing was recorded, or the file cannot be written.
    """
    if not analysis.recording.events:
        raise UserError("--picture: draws events, and the snapshot has none; call _record_memory_history before it")
    picture = timeline_picture(analysis)
    title = f"{analysis.recording.name}: {picture.title[:1].lower()}{picture.title[1:]}"
    legend = (
        html(LEGEND, x, y, color, x + 17, y + 10, text)
        for number, (color, text) in enumerate(picture.legend)
        for x, y in [(20 + 160 * (number % 6), 312 + 22 * (number // 6))]
    )
    write_whole(path, html(PICTURE, Html(PICTURE_STYLE), title, picture.svg, joined(legend)))


def _name(category: str) -> str:
    return CATEGORY_NAMES.get(category, category)


def _results(analysis: Analysis, replays: WhatIf | str) -> list[tuple[str, str, str]]:
    """The most important figures."""
    peak = analysis.peak
    unused = readable_size(max(0, peak.reserved_bytes - peak.allocated_bytes))
    found = [
        ("Tensors", readable_size(peak.allocated_bytes), instant_text(analysis)),
        ("Reserved at most", readable_size(analysis.reserved_peak_bytes), f"{unused} unused {instant_text(analysis)}"),
    ]
    if isinstance(replays, WhatIf):
        found.append(("Smallest known GPU", smallest_gpus(replays), "by memory alone, replayed"))
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
