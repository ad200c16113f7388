"""Peak host memory of a block of code, by the kernel's counter."""

import sys

import numpy as np
import pytest

from lean_finetune.train.monitor.host_peak import host_peak

MIB = 2**20
linux = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's high-water mark is Linux's")


@linux
def test_freed_memory_counts_inside_the_block_only():
    """A peak between two samples missed, or an earlier peak of the process reported."""
    before = np.ones(96 * MIB, dtype=np.uint8)
    del before
    with host_peak() as found:
        inside = np.ones(64 * MIB, dtype=np.uint8)
        del inside
    assert found.added_bytes is not None and 63 * MIB < found.added_bytes < 72 * MIB
    assert found.peak_bytes is not None and found.peak_bytes > found.added_bytes
    with host_peak() as nothing:
        pass
    assert nothing.added_bytes is not None and nothing.added_bytes < 4 * MIB
