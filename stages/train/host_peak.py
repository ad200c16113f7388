"""The most host memory held inside a stretch of a run, as the kernel counts it: nothing is sampled."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""What, written to clear_refs, sets the kernel's high-water mark to what is resident now (Linux 4.0 and later)."""
LINES = re.compile(r"^(VmRSS|VmHWM|RssFile):\s+(\d+) kB$", re.MULTILINE)
KIB = 2**10


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
    after = _resident()
    found.peak_bytes = after["VmHWM"]
    found.added_bytes = after["VmHWM"] - before["VmRSS"]
    found.file_pages_added_bytes = after["RssFile"] - before["RssFile"]


def _begin() -> dict[str, int] | None:
    """What is resident now, with the high-water mark set to it; None where the kernel does not do that."""
    try:
        CLEAR_REFS.write_text(RESET_PEAK)
        return _resident()
    except OSError:
        return None


def _resident() -> dict[str, int]:
    """The kernel's figures, in bytes."""
    return {name: int(size) * KIB for name, size in LINES.findall(STATUS.read_text())}
