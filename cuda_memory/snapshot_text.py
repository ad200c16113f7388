"""The answer of `lean-finetune snapshot` as lines of at most 100 columns: the verdict first."""

from collections.abc import Iterator, Sequence

from cuda_memory.diagnosis import Analysis, FailedRequest
from cuda_memory.gpus import Device
from cuda_memory.growth import LEAST_STEPS, LIVE, PEAK, Cause
from cuda_memory.recording import Recording
from cuda_memory.remedies import Advice
from cuda_memory.steps import RecordedSteps
from cuda_memory.timeline import origin_of
from cuda_memory.units import bar_line, counted, labelled, readable_size
from cuda_memory.what_if import Outcome, WhatIf

MOST_LINES, MOST_TENSORS, MOST_GROWN, MOST_PATH = 12, 5, 5, 66
CATEGORY_NAMES = {
    "earlier": "before recording",
    "autocast": "autocast's copies",
    "scores": "attention scores",
}
MEANINGS = {
    "earlier": "live before the recording began: no stack says what it is, usually weights and optimizer state",
    "autocast": "copies of fp32 weights in 16 bits, which autocast keeps until its context or backward ends",
    "scores": "of attention that is not fused: rows x heads x length x length",
    "backward": "allocated by backward: gradients of activations, and temporaries",
    "unknown": "no rule knows the stack, or there is none; torch.cuda.memory._record_memory_history() records stacks",
}
NOT_REPLAYED = "not replayed, because the recording contradicts itself"
AFTER_FAILURE = (
    "'as recorded' had a memory limit and lacks the request that failed; the other replays have no limit and include it"
)
BEGINS_ANEW = "what was live before the recording is placed anew, in order of its addresses"
CAUSES: dict[Cause, str] = {
    "leak": "a leak: memory between steps grows steadily, by {slope} a step",
    "fragmentation": "fragmentation: reserved memory grows by {slope} a step beyond what tensors need",
    "length": "memory grows with the length of batches",
    "kernels": "memory grows by {slope} a step with kernels for new shapes",
    "jump": "memory {jumps}",
    "steady": "memory does not grow",
    "unclear": "memory grows by {slope} a step, of no certain cause",
    "too_short": f"a trend needs {LEAST_STEPS} steps",
}


def snapshot_lines(
    analysis: Analysis, replays: WhatIf | str, devices: Sequence[int], card: Device | None, on_card: Outcome | None
) -> Iterator[str]:
    """The lines of the answer. `replays` is a text if the recording cannot be replayed: why."""
    recording, peak = analysis.recording, analysis.peak
    yield labelled("verdict", verdict_text(analysis))
    others = "" if len(devices) < 2 else f"; --device selects another of {', '.join(map(str, devices))}"
    events = counted(len(recording.events), "event")
    yield labelled("recording", f"{_shortened(recording.name)}, device {recording.device}, {events}{others}")
    for note in recording.notes:
        yield labelled("note", note)
    if isinstance(replays, str):
        yield labelled("note", f"the recording contradicts itself, and sizes can be wrong: {replays}")
    for failure in analysis.failures[-1:]:
        yield labelled("why it failed", why_it_failed(failure, len(analysis.failures)))
    yield ""
    yield f"{instant_text(analysis)}, by category"
    for category, size in peak.by_category.items():
        yield bar_line(CATEGORY_NAMES.get(category, category), size, max(peak.allocated_bytes, 1))
    for category in peak.by_category:
        if category in MEANINGS:
            yield labelled(f"  {CATEGORY_NAMES.get(category, category)}", MEANINGS[category])
    for how, size in peak.by_inference.items():
        yield labelled("  by inference", f"{readable_size(size)} {INFERENCES[how]}")
    yield ""
    yield from _places(analysis)
    yield ""
    yield labelled("step to step", steps_text(analysis.steps))
    for where, size, blocks in analysis.steps.grown[:MOST_GROWN]:
        yield f"  {readable_size(size):>10} more in {counted(blocks, 'more block')}: {_shortened(where)}"
    yield ""
    if isinstance(replays, str):
        yield labelled("what if", NOT_REPLAYED)
    else:
        yield from _replays(analysis, replays)
    if card is not None:
        yield labelled(f"  on {card.name}", on_card_text(recording, card, on_card))
    if analysis.remedies:
        yield ""
        yield from _remedies(analysis)


INFERENCES = {
    "by its size": "counted as logits because as large as the loss's largest tensor and allocated shortly before it",
    "by its lifetime": "counted as gradients because allocated by backward and live after it",
    "by its softmax": "counted as attention scores because a softmax, or as large as one beside it",
    "by its cast": "counted as activations because autocast copies it, and no weight has its size",
}


def verdict_text(analysis: Analysis) -> str:
    """The answer in one sentence or two."""
    peak = analysis.peak
    largest = next(iter(peak.by_category), None)
    share = 0 if largest is None else round(100 * peak.by_category[largest] / max(peak.allocated_bytes, 1))
    what = "" if largest is None else f"; {CATEGORY_NAMES.get(largest, largest)} {share} %"
    if analysis.failures:
        failure = analysis.failures[-1]
        if failure.impossible is not None:
            return f"out of memory, but the recorded sizes are impossible: {failure.impossible}"
        return (
            f"out of memory: {readable_size(failure.requested_bytes)} requested"
            f"{f' in {failure.where}' if failure.where else ''}, {readable_size(failure.device_free_bytes)} free; "
            f"tensors had {readable_size(failure.allocated_bytes)}{what}"
        )
    when = "at the peak" if analysis.recording.events else "when the snapshot was taken"
    return (
        f"tensors need {readable_size(peak.allocated_bytes)} {when}{what}; "
        f"{readable_size(analysis.reserved_peak_bytes)} are reserved at most"
    )


def why_it_failed(failure: FailedRequest, count: int) -> str:
    """What was free when a request failed, and what would have been enough."""
    if failure.impossible is not None:
        return f"unknown: {failure.impossible}, by the recording"
    text = (
        f"{readable_size(failure.reserved_bytes)} were reserved, {readable_size(failure.unused_bytes)} of them unused, "
        f"the largest piece {readable_size(failure.largest_unused_bytes)}. "
    )
    if failure.missing_bytes:
        text += f"{readable_size(failure.missing_bytes)} more free memory would have been enough"
    else:
        text += (
            "The driver had enough free memory: a limit of the process (its memory fraction) refused the request, or "
            "memory was released later"
        )
    if failure.is_fragmentation:
        text += ". The unused memory would have been enough in one piece: this is fragmentation"
    return text + (f" ({count} requests failed; this is the last)" if count > 1 else "")


def instant_text(analysis: Analysis) -> str:
    """Names the instant of `analysis.peak`."""
    if analysis.failures:
        return "when it failed"
    if not analysis.recording.events:
        return "when the snapshot was taken"
    return f"at the peak, after {counted(analysis.peak.event, 'event')}"


def _places(analysis: Analysis) -> Iterator[str]:
    """The lines of code with most memory, and the largest tensors."""
    peak = analysis.peak
    yield f"{instant_text(analysis)}, by line of code"
    for each in peak.lines[:MOST_LINES]:
        place = _shortened(each.where)
        yield f"  {readable_size(each.bytes):>10} {each.blocks:>6} x  {place}"
    if rest := peak.lines[MOST_LINES:]:
        size, blocks = sum(each.bytes for each in rest), sum(each.blocks for each in rest)
        yield f"  {readable_size(size):>10} {blocks:>6} x  {len(rest)} other lines"
    yield "largest tensors"
    for where, category, size, count in peak.largest[:MOST_TENSORS]:
        name = CATEGORY_NAMES.get(category, category)
        yield f"  {readable_size(size):>10} {count:>6} x  {_shortened(where, MOST_PATH - len(name))}, {name}"


def _shortened(text: str, most: int = MOST_PATH) -> str:
    return text if len(text) <= most else f"…{text[1 - most :]}"


def steps_text(steps: RecordedSteps) -> str:
    """How memory changed from step to step."""
    if not steps.rows:
        return f"unknown: {steps.found_by}"
    peaks, live = [row[PEAK] for row in steps.rows], [row[LIVE] for row in steps.rows]
    text = (
        f"{counted(len(steps.rows), 'complete step')}, found {steps.found_by}: peaks of {readable_size(min(peaks))} to "
        f"{readable_size(max(peaks))}; {readable_size(live[0])} live after the first, {readable_size(live[-1])} after "
        "the last"
    )
    for growth in steps.growth:
        slope = readable_size(max(0, round(growth.slope_bytes_per_step)))
        text += f"; {CAUSES[growth.cause].format(slope=slope, jumps=growth.jumps)}"
    return text


def _replays(analysis: Analysis, replays: WhatIf) -> Iterator[str]:
    """What would have been reserved under other settings."""
    recorded, *others = replays.outcomes
    yield "reserved at most, replayed with other settings of the allocator"
    yield f"  {recorded.name:<32}{readable_size(analysis.reserved_peak_bytes):>10}"
    for outcome in others:
        failed = f"  fails: {outcome.why}" if outcome.why else ""
        yield f"  {outcome.name:<32}{readable_size(outcome.peak_reserved_bytes):>10}{failed}"
    for reason in not_replayed(replays):
        yield labelled("  not replayed", reason)
    for note in replay_notes(analysis, replays):
        yield labelled("  note", note)
    yield labelled("  smallest known GPU", f"{smallest_gpus(replays)}, by memory alone")


def replay_notes(analysis: Analysis, replays: WhatIf) -> Iterator[str]:
    """What to know when the replays are compared with the recording."""
    replayed = replays.outcomes[0].peak_reserved_bytes
    if replayed != analysis.reserved_peak_bytes:
        yield f"the replay differs from the recording: it reserves {readable_size(replayed)} for the same requests"
    if analysis.failures:
        yield AFTER_FAILURE
    if replays.begins_anew:
        yield BEGINS_ANEW


def not_replayed(replays: WhatIf) -> list[str]:
    """What could not be replayed, with the reason."""
    reasons: dict[str, list[str]] = {}
    for text in replays.not_replayed:
        name, _, reason = text.partition(": ")
        reasons.setdefault(reason, []).append(name)
    return [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]


def smallest_gpus(replays: WhatIf) -> str:
    """The smallest card that serves the recording, by kind of segments where that matters."""
    cards = {kind: "none" if gpu is None else gpu.name for kind, gpu in replays.smallest_gpus.items()}
    each = ", ".join(f"{name} with {kind} segments" for kind, name in cards.items())
    return next(iter(cards.values())) if len(set(cards.values())) == 1 else each


def on_card_text(recording: Recording, card: Device, outcome: Outcome | None) -> str:
    """Whether and where a card would have failed; `outcome` is None if the recording cannot be replayed."""
    if outcome is None:
        return NOT_REPLAYED
    usable = f"{readable_size(card.usable_bytes(0))} without the CUDA context"
    if outcome.why is None:
        reserved = readable_size(outcome.peak_reserved_bytes)
        emptied = f"the cache was emptied {counted(outcome.retries, 'time')} to make room"
        return f"fits: {reserved} reserved at most, of {usable}; {emptied}"
    if outcome.failed_event is None:
        return f"fails before the first event: {outcome.why}"
    event = recording.events[outcome.failed_event]
    where = "" if event.stack is None else f" in {origin_of(recording.stacks[event.stack]).label}"
    return f"fails at event {outcome.failed_event:,} of {len(recording.events):,}{where}: {outcome.why}"


def _remedies(analysis: Analysis) -> Iterator[str]:
    """What would need less memory."""
    yield "what would help, the largest saving first"
    for each in analysis.remedies:
        yield f"  {saving_text(each)}: {parts_text(each)}"
        yield labelled("", f"{each.remedy.effect}", width=4)
        for tool, text in {"in lean-finetune": each.remedy.ours, **each.remedy.elsewhere}.items():
            yield f"    {tool}: {text}"


def saving_text(advice: Advice) -> str:
    """What a remedy saves."""
    size = readable_size(advice.saved_bytes)
    return f"{size} less reserved, by replay" if advice.basis == "replayed" else f"up to {size} less"


def parts_text(advice: Advice) -> str:
    """What a remedy makes smaller."""
    names = [CATEGORY_NAMES.get(part, part) for part in advice.parts]
    return " and ".join(names) + (", if these are weights" if "earlier" in advice.parts else "")
