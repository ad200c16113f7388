"""Measure the peak host memory of a block of code with the kernel's own counter, without sampling."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lean_finetune.core.process_status import process_status

CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""Written to clear_refs, it resets the kernel's high-water mark to the current value (Linux 4.0 and later)."""


@dataclass(kw_only=True)
class HostPeak:
    """Filled in when the block ends; None if the kernel has no counter (not Linux, or /proc is read-only)."""

    peak_bytes: int | None = None
    """Largest resident size of the process, mapped files included."""
    added_bytes: int | None = None
    """The peak minus the resident size before the block."""


@contextmanager
def host_peak() -> Iterator[HostPeak]:
    """Measure the resident memory inside the block."""
    found = HostPeak()
    try:
        CLEAR_REFS.write_text(RESET_PEAK)
        before = process_status()
    except OSError:
        yield found
        return
    yield found
    after = process_status()
    found.peak_bytes = after["VmHWM"]
    found.added_bytes = after["VmHWM"] - before["VmRSS"]
