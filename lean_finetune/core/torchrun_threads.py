"""Undo `OMP_NUM_THREADS=1`, which torchrun sets where its user set nothing: import this before torch.

One thread for each process makes packing to 4 bits and updates on the host many times slower. The entry shares the
cores among the processes of a machine instead (`run.cpu_threads`). A value that the user set stays.
"""

import os

VARIABLE = "OMP_NUM_THREADS"


def _set_by_torchrun() -> bool:
    """Whether the variable came with this process and not with torchrun's agent, its parent."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get(VARIABLE) != "1":
        return False
    import psutil

    try:
        # What a process was started with: what it sets later, for its children, is not there.
        return VARIABLE not in psutil.Process(os.getppid()).environ()
    except (psutil.Error, OSError):
        return False


if _set_by_torchrun():
    del os.environ[VARIABLE]
