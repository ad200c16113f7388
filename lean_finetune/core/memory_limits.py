"""The memory limit that this process shares with its container or job: Linux control groups, versions 2 and 1.

A limit holds for a group and all groups inside it, so every directory from the process's own up to the top counts.
Version 1 is what old hosts and some clusters have; there a container may see its own group only at the top.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from lean_finetune.core.units import readable_size

FILESYSTEM = Path("/")
UNLIMITED_BYTES = 1 << 60
"""Version 1 says `no limit` with a number near 2**63."""


@dataclass(frozen=True, kw_only=True)
class MemoryLimit:
    """Of one group."""

    limit_bytes: int
    room_bytes: int
    """Of the limit, what is not in use; file pages that the kernel gives back when it must count as room."""


@dataclass(frozen=True, kw_only=True)
class _Names:
    """How a version of control groups names what is read here."""

    limit: str
    used: str
    inactive_files: str
    events: str


_V2 = _Names(limit="memory.max", used="memory.current", inactive_files="inactive_file", events="memory.events")
_V1 = _Names(
    limit="memory.limit_in_bytes",
    used="memory.usage_in_bytes",
    inactive_files="total_inactive_file",
    events="memory.oom_control",
)


def memory_limits(root: Path = FILESYSTEM) -> list[MemoryLimit]:
    """All limits that hold for this process. `root` is where the file system begins."""
    return [limit for directory, names in _groups(root) if (limit := _limit_of(directory, names)) is not None]


def oom_kills(root: Path = FILESYSTEM) -> int | None:
    """How many processes of this group the kernel has ended for want of memory; None where it does not count."""
    for directory, names in _groups(root):
        if (events := directory / names.events).is_file():
            return _fields(events).get("oom_kill")
    return None


def free_host_bytes(root: Path = FILESYSTEM) -> tuple[int, str]:
    """RAM that this process can still have, and whose it is, for people."""
    available = psutil.virtual_memory().available
    limit = min(memory_limits(root), key=lambda limit: limit.room_bytes, default=None)
    if limit is None or limit.room_bytes >= available:
        return available, "of this machine's RAM"
    return limit.room_bytes, f"within this container's memory limit of {readable_size(limit.limit_bytes)}"


def _groups(root: Path) -> Iterator[tuple[Path, _Names]]:
    """Directories of the process's group and of those around it, innermost first."""
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
    """The limit of one directory; None where it sets none, or is not there."""
    file = directory / names.limit
    text = file.read_text(encoding="ascii").strip() if file.is_file() else ""
    if not text.isdigit() or int(text) >= UNLIMITED_BYTES:
        return None
    used = int((directory / names.used).read_text(encoding="ascii"))
    used -= _fields(directory / "memory.stat").get(names.inactive_files, 0)
    return MemoryLimit(limit_bytes=int(text), room_bytes=max(0, int(text) - used))


def _fields(file: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    pairs = (line.split() for line in file.read_text(encoding="ascii").splitlines())
    return {name: int(value) for name, value in pairs}
