"""The limit of a process's addresses (RLIMIT_AS: `ulimit -v`), which ends memory that the machine still has."""

import sys
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, kw_only=True)
class AddressLimit:
    """What a process may have, and has."""

    limit_bytes: int
    used_bytes: int
    """Addresses in use, whether or not memory stands behind them: libraries and mapped files count."""


def address_limit_met(asked_bytes: int | None) -> AddressLimit | None:
    """The limit of this process where a request that was refused met it; None elsewhere. Only Linux enforces it.

    Linux refuses no other request than one above a limit, or above what the machine has. What was in use then may be
    free by now: the step's tensors go as the refusal passes through it. `asked_bytes` is None where nobody said it.
    """
    if sys.platform != "linux":
        return None
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    used = psutil.Process().memory_info().vms
    beyond_machine = asked_bytes is not None and asked_bytes > psutil.virtual_memory().available
    if limit == resource.RLIM_INFINITY or (beyond_machine and used + (asked_bytes or 0) <= limit):
        return None
    return AddressLimit(limit_bytes=limit, used_bytes=used)
