"""The benchmark of state on disk measures every way, on weights that stay equal."""

import pytest

from benchmarks import offload_disk


@pytest.mark.slow
def test_a_quick_run_measures_every_way_and_finds_equal_weights(tmp_path, monkeypatch):
    """An update that is fast because it writes something else."""
    monkeypatch.chdir(tmp_path)
    measured = offload_disk.measure(quick=True)
    assert [row["what"] for row in measured.rows] == [
        offload_disk.DISK,
        offload_disk.MEMORY,
        offload_disk.SEQUENTIAL,
        offload_disk.AT_ONCE,
    ]
    assert all(row["gb_per_second"] > 0 for row in measured.rows) and all(bar.holds for bar in measured.bars)
