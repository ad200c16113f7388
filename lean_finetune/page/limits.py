"""What a page may use: as the user's own on this machine, or hosted for anybody."""

from dataclasses import dataclass

from cuda_memory.units import GIB, MIB


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of each visitor's request, and of all together."""

    is_hosted: bool
    upload_bytes: int
    """Of one upload."""
    kept_upload_bytes: int
    """Of all uploads that are being read; a later one is refused."""
    seconds: int
    """Of one command."""
    memory_bytes: int | None
    """Of one command. None: what the machine has."""
    file_bytes: int | None
    """Of each file that a command writes. None: what the disk has."""
    at_once: int
    """Commands at the same time; more wait."""
    waiting: int
    """Requests that wait; more are refused."""


LOCAL = Limits(
    is_hosted=False,
    upload_bytes=GIB,
    kept_upload_bytes=4 * GIB,
    seconds=3600,
    memory_bytes=None,
    file_bytes=None,
    at_once=2,
    waiting=20,
)
HOSTED = Limits(
    is_hosted=True,
    upload_bytes=64 * MIB,
    kept_upload_bytes=GIB,
    seconds=300,
    memory_bytes=4 * GIB,
    file_bytes=64 * MIB,
    at_once=2,
    waiting=20,
)
TEXT_BYTES = 2 * MIB
"""Of a request that is no upload: the form with another tool's YAML, which has at most 1 MiB."""
