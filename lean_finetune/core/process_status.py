"""What Linux counts of this process's memory."""

import re
from pathlib import Path

STATUS = Path("/proc/self/status")
LINES = re.compile(rb"^((?:Vm|Rss)\w+):\s+(\d+) kB$", re.MULTILINE)
KIB = 2**10


def process_status() -> dict[str, int]:
    """Bytes by the kernel's name of the count (`VmRSS`, `RssFile`); some containers' kernels leave names out.

    Raises:
        FileNotFoundError: this is not Linux.
    """
    with open(STATUS, "rb", buffering=0) as file:
        return {name.decode(): int(kib) * KIB for name, kib in LINES.findall(file.read())}
