"""What is live and what is reserved after each event of a recording.

Shape legend: E events, B blocks.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cuda_memory.origins import (
    AUTOGRAD_THREAD,
    CATEGORIES,
    EARLIER,
    NO_HISTORY,
    NO_STACKS,
    Category,
    Origin,
    is_python,
    origin_of,
)
from cuda_memory.recording import Recording

RESERVES = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
LOGITS_SHARES = (1.0, 0.5)
"""Sizes of logits, as shares of the loss's largest tensor: the same type, or half as wide."""
LOGITS_TOLERANCE = 0.02
"""Losses drop the last position of each row."""
LOGITS_EVENTS = 40
"""Logits are allocated at most so many events before the loss."""
LEAST_LOGITS_BYTES = 2**20
SCORES_SHARES = (0.25, 0.5, 1.0, 2.0)
"""Sizes of a layer's other scores, as shares of its softmax: another type, or the mask of dropout."""
SCORES_BLOCKS = 10
"""Blocks before and after a softmax among which its other scores are."""
LEAST_SCORES_BYTES = 2**20
ROUTERS = re.compile("router|gate|moe|expert", re.IGNORECASE)
"""Places whose softmax is no attention."""


@dataclass(frozen=True, eq=False)
class Timeline:
    """The blocks of a recording with their origins. Sizes are what the program requested."""

    recording: Recording
    bytes_B: np.ndarray
    start_B: np.ndarray
    """The event that allocated the block, ascending; -1 for one that was live before."""
    end_B: np.ndarray
    """The event that freed it; the number of events if none did."""
    origins_B: tuple[Origin, ...]
    category_B: np.ndarray
    """Indices into `CATEGORIES`: the origin's, except what the functions `_find_…` below find."""

    @cached_property
    def allocated_E(self) -> np.ndarray:
        """Live bytes after each event; at [0] before the first."""
        return self._live(np.ones(len(self.bytes_B), dtype=bool))

    @cached_property
    def reserved_E(self) -> np.ndarray:
        """Reserved bytes after each event; at [0] before the first."""
        initial = sum(segment.bytes for segment in self.recording.segments)
        changes = [RESERVES.get(event.action, 0) * event.bytes for event in self.recording.events]
        return np.cumsum([initial, *changes])

    def by_category(self) -> Mapping[Category, np.ndarray]:
        """Live bytes after each event, as `allocated_E`, of the categories that occur."""
        present = set(self.category_B.tolist())
        return {name: self._live(self.category_B == n) for n, name in enumerate(CATEGORIES) if n in present}

    def _live(self, chosen_B: np.ndarray) -> np.ndarray:
        changes = np.zeros(len(self.recording.events) + 2, dtype=np.int64)
        np.add.at(changes, self.start_B[chosen_B] + 1, self.bytes_B[chosen_B])
        np.subtract.at(changes, self.end_B[chosen_B] + 1, self.bytes_B[chosen_B])
        return np.cumsum(changes)[:-1]

    def live_at(self, instant: int) -> np.ndarray:
        """Numbers of the blocks that are live after `instant` events, largest first."""
        live = np.flatnonzero((self.start_B < instant) & (self.end_B >= instant))
        return live[np.argsort(-self.bytes_B[live], kind="stable")]

    @cached_property
    def peak(self) -> int:
        """The number of events after which most is live."""
        return int(np.argmax(self.allocated_E))


def timeline_of(recording: Recording) -> Timeline:
    """Find the blocks of a recording and where they come from."""
    sizes: list[int] = []
    starts: list[int] = []
    ends: list[int] = []
    stacks: list[int | None] = []
    live: dict[int, int] = {}
    end = len(recording.events)

    def add(address: int, size: int, start: int, stack: int | None) -> None:
        live[address] = len(sizes)
        sizes.append(size)
        starts.append(start)
        ends.append(end)
        stacks.append(stack)

    for segment in recording.segments:
        for block in segment.blocks:
            add(block.address, block.requested_bytes, -1, block.stack)
    for number, event in enumerate(recording.events):
        if event.action == "alloc":
            add(event.address, event.bytes, number, event.stack)
        elif event.action == "free_completed" and event.address in live:
            ends[live.pop(event.address)] = number
    known = {number: origin_of(recording.stacks[number]) for number in set(stacks) if number is not None}
    without = AUTOGRAD_THREAD if any(is_python(frame) for stack in recording.stacks for frame in stack) else NO_STACKS
    before = EARLIER if recording.events else NO_HISTORY
    origins = tuple(
        known[stack] if stack is not None else before if start < 0 else without
        for stack, start in zip(stacks, starts, strict=True)
    )
    found = Timeline(
        recording,
        np.array(sizes, dtype=np.int64),
        np.array(starts, dtype=np.int64),
        np.array(ends, dtype=np.int64),
        origins,
        np.array([CATEGORIES.index(origin.category) for origin in origins], dtype=np.int64),
    )
    _find_gradients(found)
    _find_logits(found)
    _find_scores(found)
    _find_cast_inputs(found)
    return found


def _find_gradients(timeline: Timeline) -> None:
    """Count what outlives the backward that allocated it as gradients: it is live when forward or an update goes on."""
    allocated = timeline.start_B >= 0
    outside = np.array([not origin.in_backward for origin in timeline.origins_B], dtype=bool) & allocated
    resumed = np.sort(timeline.start_B[outside])
    backward = np.flatnonzero((timeline.category_B == CATEGORIES.index("backward")) & allocated)
    after = np.searchsorted(resumed, timeline.start_B[backward])
    known = after < len(resumed)
    backward, after = backward[known], after[known]
    outlives = timeline.end_B[backward] > resumed[after]
    timeline.category_B[backward[outlives]] = CATEGORIES.index("gradients")


def _find_logits(timeline: Timeline) -> None:
    """Count activations as logits that are as large as the loss's largest tensor and allocated shortly before it."""
    logits, activations = CATEGORIES.index("logits"), CATEGORIES.index("activations")
    for loss in np.flatnonzero((timeline.category_B == logits) & (timeline.bytes_B >= LEAST_LOGITS_BYTES)):
        first = int(np.searchsorted(timeline.start_B, max(timeline.start_B[loss] - LOGITS_EVENTS, 0)))
        sizes, categories = timeline.bytes_B[first:loss], timeline.category_B[first:loss]
        alike = np.zeros(len(sizes), dtype=bool)
        for share in LOGITS_SHARES:
            size = share * timeline.bytes_B[loss]
            alike |= np.abs(sizes - size) <= LOGITS_TOLERANCE * size
        categories[alike & (categories == activations)] = logits


def _find_scores(timeline: Timeline) -> None:
    """Count a softmax among the activations, and tensors of its size from the same function, as attention's scores."""
    scores, activations = CATEGORIES.index("scores"), CATEGORIES.index("activations")
    large = (timeline.category_B == activations) & (timeline.bytes_B >= LEAST_SCORES_BYTES)
    for softmax in np.flatnonzero(large).tolist():
        origin = timeline.origins_B[softmax]
        if "softmax" not in origin.operation or ROUTERS.search(origin.place):
            continue
        function, size = _function_of(origin), timeline.bytes_B[softmax]
        for block in range(max(softmax - SCORES_BLOCKS, 0), min(softmax + SCORES_BLOCKS + 1, len(timeline.bytes_B))):
            alike = any(timeline.bytes_B[block] == share * size for share in SCORES_SHARES)
            if alike and large[block] and _function_of(timeline.origins_B[block]) == function:
                timeline.category_B[block] = scores


def _function_of(origin: Origin) -> str:
    """File and function of a place, without its line."""
    return re.sub(r":[0-9]+ ", " ", origin.place)


def _find_cast_inputs(timeline: Timeline) -> None:
    """Count what autocast copies as activations if it is half as large as no weight: it casts inputs too."""
    autocast, activations = CATEGORIES.index("autocast"), CATEGORIES.index("activations")
    stored = [CATEGORIES.index("weights"), CATEGORIES.index("earlier")]
    weights = np.unique(timeline.bytes_B[np.isin(timeline.category_B, stored)])
    if len(weights):
        inputs = (timeline.category_B == autocast) & ~np.isin(2 * timeline.bytes_B, weights)
        timeline.category_B[inputs] = activations
