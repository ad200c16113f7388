"""Linux's memory counters of this process (/proc/self/status)."""

import re
from pathlib import Path

STATUS = Path("/proc/self/status")
LINES = re.compile(rb"^((?:Vm|Rss)\w+):\s+(\d+) kB$", re.MULTILINE)
KIB = 2**10


def process_status() -> dict[str, int]:
    """Bytes by counter (`VmRSS`, `RssFile`). Some kernels lack some of them.

    Raises FileNotFoundError if this is not Linux.
    """
    with open(STATUS, "rb", buffering=0) as file:
        return {name.decode(): int(kib) * KIB for name, kib in LINES.findall(file.read())}
