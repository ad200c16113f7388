"""The training steps of a recording, and how memory changes from one to the next."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuda_memory.growth import LIVE, PEAK, RESERVED, Growth, classify
from cuda_memory.steps import NoSteps, step_ends
from cuda_memory.timeline import Timeline

LEAST_STEPS = 2
LEAST_GROWTH_BYTES = 2**20
TOO_FEW = "fewer than three optimizer steps end in this recording; three are needed to compare"


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Where training steps begin, and what they leave behind."""

    found_by: str
    """How the steps were found; why not, if there are none."""
    begins: Sequence[int] = ()
    """Numbers of events before each step, ascending."""
    rows: Sequence[dict[str, Any]] = ()
    """Of each complete step: step, live bytes at its end, its peak, reserved bytes at its end."""
    growth: Sequence[Growth] = ()
    grown: Sequence[tuple[str, int, int]] = ()
    """What more is live after the last complete step than after the first: where, bytes, blocks. Largest first."""


def steps_of(timeline: Timeline) -> Steps:
    """Find the steps of a recording: by named ranges, else by its updates, else by its calls of backward."""
    begins, found_by = _begins(timeline)
    if len(begins) <= LEAST_STEPS:
        return Steps(found_by=found_by)
    allocated, reserved = timeline.allocated_E, timeline.reserved_E
    rows = [
        {
            "step": number,
            LIVE: int(allocated[end]),
            PEAK: int(allocated[start : end + 1].max()),
            RESERVED: int(reserved[end]),
        }
        for number, (start, end) in enumerate(zip(begins, begins[1:], strict=False))
    ]
    growth = tuple(classify(rows))
    return Steps(
        found_by=found_by, begins=begins, rows=rows, growth=growth, grown=_grown(timeline, begins[1], begins[-1])
    )


def _begins(timeline: Timeline) -> tuple[list[int], str]:
    """Numbers of events before each step, and how they were found."""
    try:
        if len(ends := step_ends(timeline.recording)) > LEAST_STEPS:
            return ends, "by the ends of optimizer steps"
        reason = TOO_FEW
    except NoSteps as error:
        reason = TOO_FEW if timeline.recording.stacks else str(error)
    if len(begins := _calls_of_backward(timeline)) > LEAST_STEPS:
        return begins, "by the calls of backward"
    return [], reason


def _calls_of_backward(timeline: Timeline) -> list[int]:
    """Where backward begins again after a forward."""
    begins, ready = [], True
    for block in np.flatnonzero(timeline.start_B >= 0):
        origin = timeline.origins_B[block]
        if origin.category == "backward" and ready:
            begins.append(int(timeline.start_B[block]))
            ready = False
        ready |= origin.category == "activations" and not origin.in_backward
    return begins


def _grown(timeline: Timeline, first: int, last: int) -> tuple[tuple[str, int, int], ...]:
    """What more is live at one instant than at an earlier one, by place."""
    bytes_by, blocks_by = Counter[str](), Counter[str]()
    for instant, sign in ((first, -1), (last, 1)):
        for block in timeline.live_at(instant):
            place = timeline.origins_B[block].place
            bytes_by[place] += sign * int(timeline.bytes_B[block])
            blocks_by[place] += sign
    return tuple(
        (place, size, blocks_by[place]) for place, size in bytes_by.most_common() if size >= LEAST_GROWTH_BYTES
    )
