"""NCCL tells nobody that it waited in vain: its watchdog aborts the process. A thread here hears of it first.

Collectives on GPUs are queued, so no Python call fails when another process hangs. After the timeout of the group
(`run.rank_timeout_seconds`) PyTorch's watchdog thread marks the group with an error, waits for its debugging dump
(TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC, a quarter of a minute at least), and ends the process by SIGABRT. The launcher
would blame that process, which only waited. TORCH_NCCL_BLOCKING_WAIT would raise in the call instead, but each
collective would then wait for the GPU, and none overlap with computing.

Never run on GPUs: the tests stand in for NCCL's error.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

LOOK_SECONDS = 1.0
NO_ERROR = "SUCCESS"
TIMEOUT = "TIMEOUT"

Errors = Callable[[], list[str]]
"""Names of the errors of all groups of this process, `NO_ERROR` where there is none."""


def link_errors(device: torch.device) -> Errors | None:
    """What asks NCCL; None where it links nothing: on CPUs gloo raises what it met."""
    if device.type != "cuda" or not dist.is_initialized():
        return None
    return lambda: [group._get_backend(device).get_error().name for group in list(dist.distributed_c10d._world.pg_map)]


@contextmanager
def watched(errors: Errors | None, end: Callable[[str], None]) -> Iterator[None]:
    """Inside, a thread calls `end` with the first error that `errors` names; it must end the process."""
    if errors is None:
        yield
        return
    left = threading.Event()

    def watch() -> None:
        while not left.wait(LOOK_SECONDS):
            for error in errors():
                if error != NO_ERROR:
                    end(error)
                    return

    thread = threading.Thread(target=watch, name="nccl_watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        left.set()
        thread.join()
