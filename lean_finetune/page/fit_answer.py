"""The answer of `lean-finetune fit --json` as a document: the verdict, the bars, what would fit."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cuda_memory.page.charts import Bar, Picture, bar_chart, figure
from cuda_memory.page.html import Html, Table, document, html, joined, table
from cuda_memory.units import counted, readable_size
from lean_finetune.page.project.documents import STYLE
from lean_finetune.report.charts import CATEGORY_COLORS

Answer = Mapping[str, Any]
SEGMENTS = {"native": "fixed", "expandable": "expandable"}


def fit_document(answer: Answer, words: Sequence[str]) -> Html:
    """The page of an answer; `words` are those of the command."""
    return document("lean-finetune fit", joined(_body(answer, words)), STYLE)


def _body(answer: Answer, words: Sequence[str]) -> Iterator[Html]:
    fits = answer["verdict"] == "fits"
    yield html('<p class="verdict {}">{}</p>', "good" if fits else "bad", answer["verdict_text"])
    result = '<div><dt>{}</dt><dd class="value">{}</dd><dd class="quiet">{}</dd></div>\n'
    yield html('<dl class="results">\n{}</dl>', joined(html(result, *each) for each in _results(answer)))
    if (of_tool := answer.get("as_tool")) is not None:
        yield from _of_tool(of_tool, answer)
    yield Html("<h2>Memory</h2>")
    yield html('<div class="columns">{}{}</div>', figure(phases_chart(answer)), figure(_peak_chart(answer)))
    if answer["tiers"]:
        yield from _tiers(answer["tiers"])
    if not fits:
        yield Html("<h2>What would fit</h2>")
        yield from _offers(answer["would_fit"], words)
    if answer["from"] is not None:
        yield from _converted(answer["from"])


def _results(answer: Answer) -> Iterator[tuple[str, str, str]]:
    """The most important figures."""
    yield "Peak", readable_size(answer["peak_bytes"]), f"of tensors, in {answer['worst_phase']}"
    device = answer["device"]
    total = readable_size(device["memory_bytes"])
    yield "Usable", readable_size(answer["usable_bytes"]), f"of {total} on {device['name']}"
    yield "Smallest GPU", answer["smallest_gpu"] or "none", "of the known ones, for this run"
    for name, key in (("Longest row", "longest_row_tokens"), ("Largest micro-batch", "largest_micro_batch_tokens")):
        found = answer[key]
        yield name, f"{found['value']:,} tokens" if found["value"] else "nothing", f"by {found['limit'] or 'memory'}"
    if (speed := answer["tokens_per_second"]) is not None:
        yield "Speed", f"{speed[0]:,.0f} to {speed[1]:,.0f} tokens/s", "by the data sheet, not measured"
    if (largest := answer["largest_image"]) is not None and largest.get("width"):
        yield "Largest image", f"{largest['width']} x {largest['height']}", f"by {largest.get('limit') or 'memory'}"


def phases_chart(answer: Answer) -> Picture:
    """The peak of each phase by category, with the limit of the GPU."""
    bars = []
    for phase, found in answer["phases"].items():
        sizes = found["by_category_bytes"]
        known = [(name, color) for name, color in CATEGORY_COLORS.items() if sizes.get(name)]
        segments = [(_words(name), color, float(sizes[name])) for name, color in known]
        strong = phase == answer["worst_phase"]
        bars.append(Bar(label=phase, text=readable_size(found["peak_bytes"]), segments=segments, strong=strong))
    used = {name for found in answer["phases"].values() for name, size in found["by_category_bytes"].items() if size}
    legend = [(color, _words(name)) for name, color in CATEGORY_COLORS.items() if name in used]
    title = "Peak of tensors by phase"
    note = f"Dashed line: {readable_size(answer['usable_bytes'])} usable."
    return Picture(title, bar_chart(bars, title=title, capacity=answer["usable_bytes"]), legend, note)


def _peak_chart(answer: Answer) -> Picture:
    """The categories of the highest phase, largest first."""
    sizes = answer["phases"][answer["worst_phase"]]["by_category_bytes"]
    bars = [
        Bar(
            label=_words(name),
            text=readable_size(size),
            segments=[(_words(name), CATEGORY_COLORS.get(name, "#8d8d8d"), float(size))],
        )
        for name, size in sorted(sizes.items(), key=lambda item: -item[1])
        if size >= answer["peak_bytes"] / 1000
    ]
    title = f"At the peak, in {answer['worst_phase']}"
    return Picture(title, bar_chart(bars, title=title), [])


def _tiers(tiers: Mapping[str, Any]) -> Iterator[Html]:
    """Tensors, reserved and process memory with both kinds of segments."""
    rows = []
    for name, key in (("tensors", "tensors_bytes"), ("reserved", "reserved_bytes"), ("process", "process_bytes")):
        cells = (readable_size(tier[key]) if tier.get(key) is not None else "" for tier in tiers.values())
        rows.append((name, *cells))
    header = ("allocator segments", *(SEGMENTS.get(name, name) for name in tiers))
    yield table(Table(header, rows), "figures")


def _offers(offers: Sequence[Answer], words: Sequence[str]) -> Iterator[Html]:
    """Settings with which the run fits, as commands."""
    if not offers:
        yield Html("<p>No settings found: choose a larger GPU.</p>")
        return
    yield Html('<p class="note">The least harmful to learning first, then the fastest.</p>')
    for offer in offers:
        text = f"Peak {readable_size(offer['peak_bytes'])}, {offer['slowdown']:.2f}x time per token; {offer['effect']}"
        if offer["host_bytes"]:
            text += f"; {readable_size(offer['host_bytes'])} of offloaded state in host memory"
        command = shlex.join(["lean-finetune", *words, *(f"--set={flag}" for flag in offer["settings"])])
        yield html('<p>{}</p><pre class="row">{}</pre>', text, command)


def _of_tool(found: Answer, answer: Answer) -> Iterator[Html]:
    """The same configuration as its own tool runs it."""
    tool = answer["from"]["tool"]
    yield html("<h2>In {}</h2>", tool)
    if "not_known" in found:
        yield html("<p>Not known: {}</p>", found["not_known"])
        return
    peak = readable_size(found["peak_bytes"])
    yield html("<p><strong>{}</strong>: needs {} in {}.</p>", found["verdict"], peak, found["worst_phase"])
    causes = [html("<li>{}: {}</li>", readable_size(each["bytes"]), str(each["what"])) for each in found["causes"]]
    if causes:
        yield html("<p>Larger there because of</p><ul>{}</ul>", joined(causes))
    offers = [_tool_offer(each) for each in found["what_fits"]]
    if offers:
        yield html("<p>What fits there</p><ul>{}</ul>", joined(offers))
    elif found["verdict"] != "fits" and (change := found["one_change"]) is not None:
        yield html("<p>No keys of it make it fit. This saves most:</p><ul>{}</ul>", _tool_offer(change))


def _tool_offer(offer: Answer) -> Html:
    """Keys of a tool, and the peak with them."""
    keys = ", ".join(f"{key}: {value}" for key, value in offer["keys"].items())
    text = f"{readable_size(offer['peak_bytes'])}, {offer['verdict']}"
    return html("<li>{} → {}{}</li>", keys, text, f"; {offer['effect']}" if "effect" in offer else "")


def _converted(found: Answer) -> Iterator[Html]:
    """What became of each key of another tool's configuration."""
    yield html("<h2>The configuration of {}, here</h2>", found["tool"])
    rows = [(key, ours, _shown(found["values"].get(ours))) for key, ours in found["used"].items()]
    yield table(Table(("its key", "parameter here", "value"), rows))
    different = [html("<li>{}</li>", str(text)) for text in found["differs"]]
    if different:
        yield html("<p>Different here</p><ul>{}</ul>", joined(different))
    ignored = [(", ".join(keys), reason) for reason, keys in found["ignored"].items()]
    if found["unknown"]:
        ignored.append((", ".join(map(str, found["unknown"])), "not known, no effect here"))
    if ignored:
        summary = counted(sum(len(keys) for keys in found["ignored"].values()) + len(found["unknown"]), "key")
        yield html(
            "<details><summary>{} without effect</summary>{}</details>", summary, table(Table(("key", "why"), ignored))
        )


def _shown(value: Any) -> str:
    return "" if value is None else str(value)


def _words(name: str) -> str:
    return name.replace("_", " ")
