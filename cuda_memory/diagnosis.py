"""What filled a device's memory at the peak of a recording, what grew, what failed, and what would help."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from cuda_memory.allocator import SMALL_UNITS, UNIT_BYTES
from cuda_memory.gpus import MAX_SIZE_GIB
from cuda_memory.recorded_state import expands, settings_of
from cuda_memory.recording import Recording
from cuda_memory.remedies import Advice, advice_of, replayed
from cuda_memory.steps import RecordedSteps, steps_of
from cuda_memory.timeline import CATEGORIES, SIGNS, Category, Timeline, origin_of, timeline_of
from cuda_memory.units import GIB
from cuda_memory.what_if import WhatIf

MOST_FAILURES = 20


@dataclass(frozen=True, kw_only=True)
class FailedRequest:
    """A request that PyTorch answered with OutOfMemoryError."""

    event: int
    """Number of events before it."""
    requested_bytes: int
    device_free_bytes: int
    """What the driver reported as free."""
    allocated_bytes: int
    reserved_bytes: int
    largest_unused_bytes: int
    """The largest free range inside reserved memory: larger requests need new memory."""
    missing_bytes: int
    """How much more free memory would have served the request: a segment, or pages of one that expands."""
    where: str

    @property
    def unused_bytes(self) -> int:
        """Reserved memory without tensors in it."""
        return self.reserved_bytes - self.allocated_bytes

    @property
    def is_fragmentation(self) -> bool:
        """Whether unused memory would have been enough in one piece."""
        return self.unused_bytes >= self.requested_bytes

    @property
    def impossible(self) -> str | None:
        """Why no GPU can have these sizes; None if one can."""
        if self.unused_bytes < 0:
            return "tensors have more memory than is reserved"
        if self.device_free_bytes > MAX_SIZE_GIB * GIB:
            return "more memory is free than any GPU has"
        return "a request of 0 B failed" if self.requested_bytes == 0 else None


def failures_of(timeline: Timeline) -> tuple[FailedRequest, ...]:
    """The last failed requests of a recording, in order."""
    failed = [number for number, event in enumerate(timeline.recording.events) if event.action == "oom"]
    return tuple(_failure(timeline, number) for number in failed[-MOST_FAILURES:])


def _failure(timeline: Timeline, number: int) -> FailedRequest:
    recording = timeline.recording
    event = recording.events[number]
    unused, new = max(unused_ranges(recording, number), default=0), _new_bytes(recording, event.bytes)
    return FailedRequest(
        event=number,
        requested_bytes=event.bytes,
        device_free_bytes=event.address,
        allocated_bytes=int(timeline.allocated_E[number]),
        reserved_bytes=int(timeline.reserved_E[number]),
        largest_unused_bytes=unused,
        missing_bytes=max(0, new - event.address),
        where="" if event.stack is None else origin_of(recording.stacks[event.stack]).label,
    )


def _new_bytes(recording: Recording, request_bytes: int) -> int:
    """The memory that the allocator reserves for a request which no free block serves."""
    settings = settings_of(recording)
    units = settings.round_up(max(request_bytes, 1))
    if not expands(recording):
        return settings.segment_units(units) * UNIT_BYTES
    page = settings.page_units(is_small=units <= SMALL_UNITS)
    return -(-units // page) * page * UNIT_BYTES


def unused_ranges(recording: Recording, instant: int) -> Iterator[int]:
    """Sizes of the free ranges inside reserved memory after `instant` events, in order of addresses."""
    edges = [(segment.address, segment.bytes, 1) for segment in recording.segments]
    starts = {segment.address for segment in recording.segments}
    live = {block.address: block.bytes for segment in recording.segments for block in segment.blocks}
    for event in recording.events[:instant]:
        if event.action == "alloc":
            live[event.address] = -(-event.bytes // UNIT_BYTES) * UNIT_BYTES
        elif event.action == "free_completed":
            live.pop(event.address, None)
        elif sign := SIGNS.get(event.action, 0):
            edges.append((event.address, event.bytes, sign))
            if event.action == "segment_alloc":
                starts.add(event.address)
    # An address is reserved where the signs before it sum to one; a live block takes that away again.
    bounds: dict[int, int] = {}
    for address, size, sign in [*edges, *((address, size, -1) for address, size in live.items())]:
        bounds[address] = bounds.get(address, 0) + sign
        bounds[address + size] = bounds.get(address + size, 0) - sign
    depth, begin = 0, None
    for address in sorted(bounds):
        if begin is not None and (depth + bounds[address] < 1 or address in starts):
            yield address - begin
            begin = None
        depth += bounds[address]
        if depth >= 1 and begin is None:
            begin = address


LARGEST_TENSORS = 10
OPERATION = re.compile(r" \((\w+)\)$")
"""At the end of an origin's label."""
EXPANDING = "expandable_segments:True"
"""Name of the replay with segments that expand."""
INFERRED: Mapping[Category, str] = {
    "logits": "by its size",
    "gradients": "by its lifetime",
    "scores": "by its softmax",
    "activations": "by its cast",
}
"""How a category was found that a block's own stack does not show."""


@dataclass(frozen=True, kw_only=True)
class Holding:
    """Live blocks from one place."""

    where: str
    category: Category
    bytes: int
    blocks: int
    in_backward: bool


@dataclass(frozen=True, kw_only=True)
class CodeLine:
    """Live blocks from one line of code, of all its operations and categories."""

    where: str
    """The line, then its operations, largest first."""
    categories: Sequence[Category]
    bytes: int
    blocks: int


@dataclass(frozen=True, kw_only=True)
class Instant:
    """What is live at one instant of a recording."""

    event: int
    """Number of events before it."""
    allocated_bytes: int
    reserved_bytes: int
    largest_unused_bytes: int
    """The largest free range inside reserved memory."""
    by_category: Mapping[Category, int]
    """Bytes, largest first."""
    holdings: Sequence[Holding]
    """By place and category, largest first."""
    largest: Sequence[tuple[str, Category, int, int]]
    """The largest tensors, equal ones together: where, category, bytes of each, number."""
    lines: Sequence[CodeLine]
    """By line of code, largest first."""
    by_inference: Mapping[str, int]
    """Bytes whose category does not come from their stack alone: how it was found."""


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """The answers about one recording."""

    timeline: Timeline
    peak: Instant
    reserved_peak_bytes: int
    failures: Sequence[FailedRequest]
    steps: RecordedSteps
    remedies: list[Advice]
    """For the largest categories of the peak; what saves most first."""

    @property
    def recording(self) -> Recording:
        """What was analysed."""
        return self.timeline.recording

    def checked_by(self, replays: WhatIf) -> "Analysis":
        """The same, with what expandable segments save by replay."""
        expanding = next(each for each in replays.outcomes if each.name == EXPANDING)
        baseline = self.baseline_bytes(replays)
        return replace(self, remedies=replayed(self.remedies, self.recording, baseline, expanding.peak_reserved_bytes))

    def baseline_bytes(self, replays: WhatIf) -> int:
        """What was reserved, to compare other settings with.

        After a failed request it is a replay: other replays have no memory limit and include that request.
        """
        return replays.outcomes[1].peak_reserved_bytes if self.failures else self.reserved_peak_bytes

    def as_json(self) -> dict[str, Any]:
        """The answers in plain values. Sizes are in bytes."""
        recording, steps = self.recording, self.steps
        return {
            "name": recording.name,
            "device": recording.device,
            "events": len(recording.events),
            "notes": list(recording.notes),
            "reserved_peak_bytes": self.reserved_peak_bytes,
            "peak": asdict(self.peak),
            "failures": [asdict(each) for each in self.failures],
            "steps": {
                "found_by": steps.found_by,
                "rows": list(steps.rows),
                "growth": [asdict(growth) for growth in steps.growth],
                "grown": [{"where": where, "bytes": size, "blocks": blocks} for where, size, blocks in steps.grown],
            },
            "remedies": [
                {"for": list(each.parts), "saved_bytes": each.saved_bytes, "basis": each.basis, **asdict(each.remedy)}
                for each in self.remedies
            ],
        }


def analyse(recording: Recording) -> Analysis:
    """Analyse a recording: seconds for 100,000 events.

    At a failed request the instant of interest is that request; otherwise the one with most live bytes.
    """
    timeline = timeline_of(recording)
    failures = failures_of(timeline)
    peak = instant_of(timeline, failures[-1].event if failures else timeline.peak)
    return Analysis(
        timeline=timeline,
        peak=peak,
        reserved_peak_bytes=int(timeline.reserved_E.max()),
        failures=failures,
        steps=steps_of(timeline),
        remedies=advice_of(recording, peak.by_category, peak.allocated_bytes, peak.reserved_bytes),
    )


def instant_of(timeline: Timeline, event: int) -> Instant:
    """What is live after so many events."""
    bytes_by, blocks_by = Counter[tuple[str, Category, bool]](), Counter[tuple[str, Category, bool]]()
    by_category, by_inference = Counter[Category](), Counter[str]()
    equal = Counter[tuple[str, Category, int]]()
    for block in timeline.live_at(event):
        origin, category = timeline.origins_B[block], CATEGORIES[timeline.category_B[block]]
        size, key = int(timeline.bytes_B[block]), (origin.label, category, origin.in_backward)
        bytes_by[key] += size
        blocks_by[key] += 1
        by_category[category] += size
        equal[origin.label, category, size] += 1
        if category != origin.category:
            by_inference[INFERRED[category]] += size
    holdings = [
        Holding(where=key[0], category=key[1], in_backward=key[2], bytes=size, blocks=blocks_by[key])
        for key, size in bytes_by.most_common()
    ]
    largest = sorted(equal.items(), key=lambda item: -item[0][2])[:LARGEST_TENSORS]
    return Instant(
        event=event,
        allocated_bytes=int(timeline.allocated_E[event]),
        reserved_bytes=int(timeline.reserved_E[event]),
        largest_unused_bytes=max(unused_ranges(timeline.recording, event), default=0),
        by_category=dict(by_category.most_common()),
        holdings=holdings,
        lines=_by_line(holdings),
        largest=[(*key, count) for key, count in largest],
        by_inference=dict(by_inference),
    )


def _by_line(holdings: Sequence[Holding]) -> list[CodeLine]:
    """Holdings with the same line of code as one."""
    by_line: dict[str, list[Holding]] = {}
    for each in holdings:
        by_line.setdefault(OPERATION.sub("", each.where), []).append(each)
    lines = []
    for line, own in by_line.items():
        operations = dict.fromkeys(found[1] for each in own if (found := OPERATION.search(each.where)))
        lines.append(
            CodeLine(
                where=f"{line} ({', '.join(operations)})" if operations else line,
                categories=list(dict.fromkeys(each.category for each in own)),
                bytes=sum(each.bytes for each in own),
                blocks=sum(each.blocks for each in own),
            )
        )
    return sorted(lines, key=lambda each: -each.bytes)
