"""A recording of PyTorch's CUDA caching allocator on one device: what was reserved at its beginning, and every event.

`torch.cuda.memory._record_memory_history` makes one, and `torch.cuda.memory._dump_snapshot` writes it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

Action = Literal[
    "alloc",  # A request was served. `bytes` is what it asked for.
    "free_requested",  # A tensor was freed. Its block may still be in use on another stream.
    "free_completed",  # Its block is free.
    "segment_alloc",  # A segment of fixed size was reserved. It stands before the allocation that caused it.
    "segment_free",  # A segment of fixed size was released to the driver.
    "segment_map",  # Memory was mapped into a segment that expands.
    "segment_unmap",  # Memory of a segment that expands was released.
    "oom",  # A request failed. `bytes` is what it asked for, `address` what the driver reported as free.
    "snapshot",  # A snapshot was taken.
]
MAX_EVENTS = 2_000_000
MAX_ADDRESS, MAX_SIZE = 2**64, 2**48
"""Files are read up to these: a size of 256 TiB is more than any device has."""
MAX_STACK_FRAMES = 10_000
"""Python's limit of recursion is 1,000 frames."""
MAX_NAME_LENGTH = 1000
ACTIONS: tuple[Action, ...] = get_args(Action)


def printable(text: str) -> str:
    """A text from a file as it can be printed: no control characters, not endless."""
    text = text[:MAX_NAME_LENGTH]
    return text if text.isprintable() else "".join(each if each.isprintable() else "?" for each in text)


class Frame(NamedTuple):
    """One frame of a stack."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveBlock:
    """A block in use when the recording began, or freed and still in use on another stream."""

    address: int
    bytes: int
    """Size of the block. Up to 1 MiB more may belong to it: what was too small to be split off."""
    requested_bytes: int
    """What the program asked for; equal to `bytes` where the source does not say."""
    stack: int | None = None
    """Index into `Recording.stacks`; None if unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Memory that was reserved when the recording began.

    Of a segment that expands, each range that is mapped without a gap is a Segment.
    """

    address: int
    bytes: int
    stream: int = 0
    is_expandable: bool = False
    is_small: bool | None = None
    """Whether it belongs to the pool of requests up to 1 MiB; None if unknown."""
    private_pool: tuple[int, int] = (0, 0)
    """Id of its private pool, of CUDA graphs or a torch.cuda.MemPool; (0, 0) is the default pool."""
    blocks: tuple[LiveBlock, ...] = ()
    """Ascending by address. The rest of the segment is free."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One action of the allocator."""

    action: Action
    address: int
    bytes: int
    stream: int = 0
    stack: int | None = None
    """Index into `Recording.stacks`; None if unknown."""
    time_us: int | None = None
    private_pool: tuple[int, int] = (0, 0)
    """As in `Segment`. Only needed of `segment_alloc` and `segment_map`: allocations lie in their segments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Annotation:
    """The beginning or the end of a range that the program named: torch.profiler.record_function, an optimizer step."""

    name: str
    stage: Literal["START", "END"]
    time_us: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """The memory of one device from the beginning of a recording to its end."""

    name: str
    """The file it was read from."""
    device: int = 0
    segments: tuple[Segment, ...] = ()
    """Ascending by address."""
    events: tuple[Event, ...] = ()
    stacks: tuple[tuple[Frame, ...], ...] = ()
    """Innermost frame first."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The allocator's settings by their names in a snapshot, such as `expandable_segments`; empty if unknown."""
    annotations: tuple[Annotation, ...] = ()
    """In order of time."""
    notes: tuple[str, ...] = ()
    """What the source lacks, or where its events contradict each other."""
