"""Report NCCL timeouts before PyTorch's watchdog aborts the process.

Collectives on GPUs are asynchronous, so no Python call fails when another process hangs. After the timeout of the
process group (`run.rank_timeout_seconds`) PyTorch's watchdog thread records an error, waits for its debug dump
(TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC, at least 15 s), and ends the process by SIGABRT. The launcher would blame that
process, which only waited. TORCH_NCCL_BLOCKING_WAIT would raise in the call instead, but then no collective could
overlap with computation.

Not tested on GPUs: the tests simulate NCCL's error.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

POLL_SECONDS = 1.0
NO_ERROR = "SUCCESS"
TIMEOUT = "TIMEOUT"

Errors = Callable[[], list[str]]
"""Returns the error names of all process groups; `NO_ERROR` for a group without one."""


def nccl_errors(device: torch.device) -> Errors | None:
    """Return a function that queries NCCL; None on CPUs, where gloo raises its errors."""
    if device.type != "cuda" or not dist.is_initialized():
        return None
    return lambda: [group._get_backend(device).get_error().name for group in list(dist.distributed_c10d._world.pg_map)]


@contextmanager
def watch_nccl(errors: Errors | None, end: Callable[[str], None]) -> Iterator[None]:
    """Poll `errors` in a thread and call `end` with the first one; it must end the process."""
    if errors is None:
        yield
        return
    finished = threading.Event()

    def poll() -> None:
        while not finished.wait(POLL_SECONDS):
            for error in errors():
                if error != NO_ERROR:
                    end(error)
                    return

    thread = threading.Thread(target=poll, name="nccl_watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()
