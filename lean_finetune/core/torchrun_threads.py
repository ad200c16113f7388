"""Environment variables that torch reads once: import this before torch.

Undo `OMP_NUM_THREADS=1`, which torchrun sets unless the user set it.
With one thread per process, 4-bit quantization and updates on the host are many times slower. The entry divides the
cores among the processes of a machine instead (`run.cpu_threads`). A value that the user set stays.
"""

import os

VARIABLE = "OMP_NUM_THREADS"


def _set_by_torchrun() -> bool:
    """Whether this process has the variable but torchrun's agent, its parent, does not."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get(VARIABLE) != "1":
        return False
    import psutil

    try:
        # The environment at the start of the parent, without variables that it set later for its children.
        return VARIABLE not in psutil.Process(os.getppid()).environ()
    except (psutil.Error, OSError):
        return False


if _set_by_torchrun():
    del os.environ[VARIABLE]
# Otherwise each process logs how the others ended, and that it cannot resolve a machine's name.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
