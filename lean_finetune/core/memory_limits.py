"""Memory limits of the container or job of this process: Linux control groups, versions 1 and 2.

A limit applies to a group and all groups inside it, so every directory from the process's group up to the root counts.
Old hosts and some clusters use version 1, where a container may see its own group only at the root.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

from cuda_memory.units import readable_size

FILESYSTEM = Path("/")
UNLIMITED_BYTES = 1 << 60
"""Version 1 writes a number near 2**63 for `no limit`."""


@dataclass(frozen=True, kw_only=True)
class MemoryLimit:
    """The limit of one group."""

    limit_bytes: int
    room_bytes: int
    """Unused part of the limit. Reclaimable file pages count as unused."""


class _Names(NamedTuple):
    """File and field names in one version of control groups."""

    limit: str
    used: str
    inactive_files: str
    events: str


_V2 = _Names("memory.max", "memory.current", "inactive_file", "memory.events")
_V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "memory.oom_control")


def memory_limits(root: Path = FILESYSTEM) -> list[MemoryLimit]:
    """All limits that apply to this process. `root` is the root of the file system."""
    return [limit for directory, names in _groups(root) if (limit := _limit_of(directory, names)) is not None]


def oom_kills(root: Path = FILESYSTEM) -> int | None:
    """Number of processes in this group that the kernel's OOM killer has ended; None if the kernel does not count."""
    for directory, names in _groups(root):
        if (events := directory / names.events).is_file():
            return _fields(events).get("oom_kill")
    return None


def free_host_bytes(root: Path = FILESYSTEM) -> tuple[int, str]:
    """RAM available to this process, and what limits it, as text."""
    available = psutil.virtual_memory().available
    limit = min(memory_limits(root), key=lambda limit: limit.room_bytes, default=None)
    if limit is None or limit.room_bytes >= available:
        return available, "of this machine's RAM"
    return limit.room_bytes, f"within this container's memory limit of {readable_size(limit.limit_bytes)}"


def host_limit_bytes() -> int:
    """RAM that this process may use at most: this machine's, or a container's limit."""
    return min([psutil.virtual_memory().total, *(limit.limit_bytes for limit in memory_limits())])


def _groups(root: Path) -> Iterator[tuple[Path, _Names]]:
    """Directories of the process's group and its parents, innermost first."""
    membership = root / "proc/self/cgroup"
    if not membership.is_file():
        return
    mounted = root / "sys/fs/cgroup"
    for line in membership.read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        names, top = (_V1, mounted / "memory") if controllers else (_V2, mounted)
        own = top / path.lstrip("/")
        yield from ((place, names) for place in (own, *own.parents) if place == top or top in place.parents)


def _limit_of(directory: Path, names: _Names) -> MemoryLimit | None:
    """The limit of one directory; None if there is none."""
    file = directory / names.limit
    text = file.read_text(encoding="ascii").strip() if file.is_file() else ""
    if not text.isdigit() or int(text) >= UNLIMITED_BYTES:
        return None
    used = int((directory / names.used).read_text(encoding="ascii"))
    used -= _fields(directory / "memory.stat").get(names.inactive_files, 0)
    return MemoryLimit(limit_bytes=int(text), room_bytes=max(0, int(text) - used))


def _fields(file: Path) -> dict[str, int]:
    """The fields of a file with lines of a name and a number."""
    pairs = (line.split() for line in file.read_text(encoding="ascii").splitlines())
    return {name: int(value) for name, value in pairs}
