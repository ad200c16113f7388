"""The address-space limit of a process (RLIMIT_AS, `ulimit -v`), which can refuse memory that the machine has."""

import sys
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, kw_only=True)
class AddressLimit:
    """The limit and its use, in bytes."""

    limit_bytes: int
    used_bytes: int
    """Mapped addresses, with or without physical memory. Libraries and mapped files count."""


def address_limit_met(requested_bytes: int | None) -> AddressLimit | None:
    """The limit of this process if it caused a refused allocation; None otherwise. Only Linux enforces it.

    Linux refuses an allocation only above a limit or above the machine's memory. Memory in use at that time may be free
    now, because the exception has released the step's tensors. `requested_bytes` is None if the request is unknown.
    """
    if sys.platform != "linux":
        return None
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    used = psutil.Process().memory_info().vms
    beyond_machine = requested_bytes is not None and requested_bytes > psutil.virtual_memory().available
    if limit == resource.RLIM_INFINITY or (beyond_machine and used + (requested_bytes or 0) <= limit):
        return None
    return AddressLimit(limit_bytes=limit, used_bytes=used)
