"""What filled a device's memory at the peak of a recording, what grew, what failed, and what would help."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lean_finetune.memory.diagnosis.failures import Failure, failures_of, unused_ranges
from lean_finetune.memory.diagnosis.growth_by_step import Steps, steps_of
from lean_finetune.memory.diagnosis.origins import CATEGORIES, Category
from lean_finetune.memory.diagnosis.remedies import EXPANDABLE, GRAD_CKPT, QLORA, REMEDIES, Remedy
from lean_finetune.memory.diagnosis.timeline import Timeline, timeline_of
from lean_finetune.memory.recording.recorded_state import expands
from lean_finetune.memory.recording.recording import Recording
from lean_finetune.memory.recording.what_if import WhatIf

LARGEST_TENSORS = 10
REMEDY_SHARE = 0.05
"""Categories below this share of the peak get no remedy."""
FRAGMENTED_SHARE = 0.1
"""Of reserved memory: unused memory above this share is worth a remedy."""
EXPANDING = "expandable_segments:True"
"""Name of the replay with segments that expand."""
CHECKPOINTED, QUANTIZED = "utils/checkpoint.py", "bitsandbytes/functional.py"
"""Files in stacks of runs with checkpointing, and with quantised weights."""


@dataclass(frozen=True, kw_only=True)
class Holding:
    """Live blocks from one place."""

    where: str
    category: Category
    bytes: int
    blocks: int
    in_backward: bool


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
    largest: Sequence[tuple[str, Category, int]]
    """The largest tensors: where, category, bytes."""
    by_inference: Mapping[str, int]
    """Bytes whose category does not come from their stack alone: how it was found."""


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """The answers about one recording."""

    timeline: Timeline
    peak: Instant
    reserved_peak_bytes: int
    failures: Sequence[Failure]
    steps: Steps
    remedies: Sequence[tuple[Category | str, Remedy]]
    """For the largest categories of the peak, the largest first."""

    @property
    def recording(self) -> Recording:
        """What was analysed."""
        return self.timeline.recording

    def checked_by(self, replays: WhatIf) -> "Analysis":
        """The same, without expandable segments as a remedy where a replay with them reserves no less."""
        expanding = next((each for each in replays.outcomes if each.name == EXPANDING), None)
        if expanding is None or expanding.peak_reserved_bytes < self.baseline_bytes(replays):
            return self
        return replace(self, remedies=[each for each in self.remedies if each[1] != EXPANDABLE])

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
            "remedies": [{"for": category, **asdict(remedy)} for category, remedy in self.remedies],
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
        remedies=_remedies(timeline, peak),
    )


def instant_of(timeline: Timeline, event: int) -> Instant:
    """What is live after so many events."""
    bytes_by, blocks_by = Counter[tuple[str, Category, bool]](), Counter[tuple[str, Category, bool]]()
    by_category, by_inference = Counter[Category](), Counter[str]()
    largest: list[tuple[str, Category, int]] = []
    for block in timeline.live_at(event):
        origin, category = timeline.origins_B[block], CATEGORIES[timeline.category_B[block]]
        size, key = int(timeline.bytes_B[block]), (origin.label, category, origin.in_backward)
        bytes_by[key] += size
        blocks_by[key] += 1
        by_category[category] += size
        if len(largest) < LARGEST_TENSORS:
            largest.append((origin.label, category, size))
        if category != origin.category:
            by_inference["by its size" if category == "logits" else "by its lifetime"] += size
    return Instant(
        event=event,
        allocated_bytes=int(timeline.allocated_E[event]),
        reserved_bytes=int(timeline.reserved_E[event]),
        largest_unused_bytes=max(unused_ranges(timeline.recording, event), default=0),
        by_category=dict(by_category.most_common()),
        holdings=[
            Holding(where=key[0], category=key[1], in_backward=key[2], bytes=size, blocks=blocks_by[key])
            for key, size in bytes_by.most_common()
        ],
        largest=largest,
        by_inference=dict(by_inference),
    )


def _remedies(timeline: Timeline, peak: Instant) -> list[tuple[Category | str, Remedy]]:
    """What would make the largest categories smaller, without what the stacks show to be in use."""
    recording = timeline.recording
    files = {frame.file for stack in recording.stacks for frame in stack}
    in_use = set()
    if any(file.endswith(CHECKPOINTED) for file in files):
        in_use.add(GRAD_CKPT.ours)
    if any(QUANTIZED in file for file in files):
        in_use.add(QLORA.ours)
    found: list[tuple[Category | str, Remedy]] = []
    for category, size in peak.by_category.items():
        new = [each for each in REMEDIES.get(category, ()) if each.ours not in in_use]
        if new and size >= REMEDY_SHARE * peak.allocated_bytes:
            found.append((category, new[0]))
            in_use.add(new[0].ours)
    unused = peak.reserved_bytes - peak.allocated_bytes
    if unused > FRAGMENTED_SHARE * peak.reserved_bytes and not expands(recording):
        found.append(("reserved but unused", EXPANDABLE))
    return found
