"""A traced run as the timeline of a replay: exact sizes, cut into the units of the plan."""

from stages.estimate.origins import OriginTrace
from stages.estimate.step_units import step_units
from stages.estimate.templates import Timeline, Unit

CLIP = "clip"
"""The phase with which a step's update begins."""


def timeline_of(trace: OriginTrace, loss_chunk: int | None) -> Timeline:
    """The events of whole steps of padded rows, with sizes before rounding.

    Args:
        trace: of any number of steps.
        loss_chunk: trained positions whose logits existed at once, None for all.
    """
    events = tuple(
        (storage, trace.exact_bytes[storage] * (1 if change > 0 else -1)) for storage, change in trace.events
    )
    updates = [start for start, _, phase in trace.phases if phase == CLIP]
    marks: list[tuple[int, Unit]] = []
    begun = list(trace.micro_batches)
    for update in updates:
        own = [(start, shape) for start, shape in begun if start < update]
        begun = begun[len(own) :]
        shapes = [(shape.rows, shape.length, shape.supervised) for _, shape in own]
        starts = [*(start for start, _ in own), update]
        marks += zip(starts, step_units(shapes, loss_chunk), strict=True)
    return Timeline(events=events, units=tuple(marks))
