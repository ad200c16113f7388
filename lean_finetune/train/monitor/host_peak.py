"""The most host memory held inside a stretch of a run, as the kernel counts it: nothing is sampled."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lean_finetune.core.process_status import process_status

CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""What, written to clear_refs, sets the kernel's high-water mark to what is resident now (Linux 4.0 and later)."""


@dataclass(kw_only=True)
class HostPeak:
    """Filled in when the stretch ends; None where no kernel tells (not Linux, or /proc may not be written)."""

    peak_bytes: int | None = None
    """The most that was resident: of the whole process, pages of files included."""
    added_bytes: int | None = None
    """That, less what was resident before."""
    file_pages_added_bytes: int | None = None
    """Of what stayed, pages of files: those that the system can take back."""


@contextmanager
def host_peak() -> Iterator[HostPeak]:
    """Count what is resident inside."""
    found = HostPeak()
    before = _begin()
    yield found
    if before is None:
        return
    after = process_status()
    found.peak_bytes = after["VmHWM"]
    found.added_bytes = after["VmHWM"] - before["VmRSS"]
    found.file_pages_added_bytes = after["RssFile"] - before["RssFile"]


def _begin() -> dict[str, int] | None:
    """What is resident now, with the high-water mark set to it; None where the kernel does not do that."""
    try:
        CLEAR_REFS.write_text(RESET_PEAK)
        return process_status()
    except OSError:
        return None
