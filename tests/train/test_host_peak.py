"""What the host held inside a stretch of a run, by the kernel's own count."""

import sys
from pathlib import Path

import numpy as np
import pytest

from lean_finetune.train.monitor import host_peak as module
from lean_finetune.train.monitor.host_peak import HostPeak, host_peak

MIB = 2**20
linux = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's high-water mark is Linux's")


@linux
def test_freed_memory_counts_inside_the_block_only():
    """A peak between two samples missed, or one of the process's past taken for this stretch's."""
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


@linux
def test_pages_of_mapped_files_are_separated(tmp_path: Path):
    """A mapped file taken for memory that cannot be given back, or not seen at all."""
    (tmp_path / "file").write_bytes(bytes(32 * MIB))
    with host_peak() as found:
        mapped = np.memmap(tmp_path / "file", dtype=np.uint8, mode="r")
        assert int(mapped.sum()) == 0
    assert found.file_pages_added_bytes is not None and 31 * MIB < found.file_pages_added_bytes < 36 * MIB


def test_without_kernel_counter_all_figures_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A zero that reads like a measurement."""
    monkeypatch.setattr(module, "CLEAR_REFS", tmp_path / "none" / "clear_refs")
    with host_peak() as found:
        pass
    assert found == HostPeak()
