"""Settings of the caching allocator and what each does to a request.

Read in PyTorch's c10/core/AllocatorConfig.cpp, c10/cuda/CUDACachingAllocator.cpp and the headers of 2.13. Recordings of
GPUs confirm the defaults; none was found that has another value of these settings.
"""

from dataclasses import dataclass

from cuda_memory.errors import UserError
from cuda_memory.units import MIB

UNIT_BYTES = 512
"""Every request is rounded up to a multiple of this (kMinBlockSize)."""
MIB_UNITS = MIB // UNIT_BYTES
SMALL_UNITS = MIB_UNITS
"""Largest request that the small pool serves (kSmallSize)."""
SMALL_SEGMENT_UNITS = 2 * MIB_UNITS
"""Size of a segment of the small pool, and of the pages of its expandable segment (kSmallBuffer)."""
OWN_SEGMENT_UNITS = 10 * MIB_UNITS
"""Smallest request that gets a segment to itself (kMinLargeAlloc)."""
OWN_SEGMENT_STEP_UNITS = 2 * MIB_UNITS
"""The size of such a segment is rounded up to a multiple of this (kRoundLarge)."""

MAX_SHOWN = 40
"""Characters of a refused value that a message shows: a file may contain values of any length."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatorSettings:
    """What PYTORCH_CUDA_ALLOC_CONF sets, besides expandable_segments. The defaults are PyTorch's."""

    max_split_bytes: int | None = None
    """max_split_size_mb: free blocks of this size and more are not split; None for no limit."""
    max_non_split_rounding_bytes: int = 20 * MIB
    """max_non_split_rounding_mb: such a block serves requests that are smaller by less than this."""
    garbage_collection_threshold: float | None = None
    """Share of the capacity above which segments that were unused for long are released."""
    roundup_power2_divisions: tuple[int, ...] = ()
    """Divisions between two powers of two to which a request is rounded up, by interval; 0 or empty for 512 bytes."""
    large_segment_bytes: int = 20 * MIB
    """large_segment_size_mb, a newer setting: segments for requests from 1 to 10 MiB, and pages of the large pool."""

    def __post_init__(self) -> None:
        """Refuse what PyTorch refuses.

        Raises:
            UserError: a value that PyTorch does not take.
        """
        limit = self.max_split_bytes
        if limit is not None and limit < 20 * MIB:
            raise UserError(f"max_split_size_mb: must be at least 20, as PyTorch demands; got {limit / MIB:g}")
        if not MIB <= self.large_segment_bytes <= 1 << 40:
            got_mb = str(self.large_segment_bytes // MIB)[:MAX_SHOWN]
            raise UserError(f"large_segment_size_mb: must be from 1 to {1 << 20}; got {got_mb}")
        threshold = self.garbage_collection_threshold
        if threshold is not None and not 0 < threshold < 1:
            raise UserError(f"garbage_collection_threshold: must be between 0 and 1, both excluded; got {threshold}")
        if any(divisions & (divisions - 1) for divisions in self.roundup_power2_divisions):
            got = str(self.roundup_power2_divisions)[:MAX_SHOWN]
            raise UserError(f"roundup_power2_divisions: every number must be a power of two, or 0; got {got}")

    def round_up(self, count_bytes: int) -> int:
        """The size in units of the block for a request."""
        divisions = self._divisions(count_bytes)
        if divisions <= 1 or count_bytes <= UNIT_BYTES * divisions:
            return (count_bytes + UNIT_BYTES - 1) // UNIT_BYTES
        floor = 1 << count_bytes.bit_length() - 1
        step = floor // divisions
        return -(-count_bytes // step) * step // UNIT_BYTES

    def _divisions(self, count_bytes: int) -> int:
        """The divisions of the interval of a request: below 2 MiB, from 2 to 4 MiB, …, from 32 GiB on."""
        if not self.roundup_power2_divisions:
            return 0
        interval = max(0, count_bytes.bit_length() - MIB.bit_length())
        return self.roundup_power2_divisions[min(interval, len(self.roundup_power2_divisions) - 1)]

    def segment_units(self, wanted: int) -> int:
        """The size of a new segment of fixed size for a request, both in units."""
        if wanted <= SMALL_UNITS:
            return SMALL_SEGMENT_UNITS
        if wanted < OWN_SEGMENT_UNITS:
            return self.large_segment_bytes // UNIT_BYTES
        return -(-wanted // OWN_SEGMENT_STEP_UNITS) * OWN_SEGMENT_STEP_UNITS

    def page_units(self, *, is_small: bool) -> int:
        """By how much a segment that expands grows."""
        return SMALL_SEGMENT_UNITS if is_small else self.large_segment_bytes // UNIT_BYTES
