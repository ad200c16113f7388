"""The benchmark of compressed activations: peaks as predicted, memory as equal as it says, and equal losses."""

import pytest

from benchmarks import compression


@pytest.mark.slow
def test_a_quick_run_counts_what_it_predicted_and_finds_equal_memory(tmp_path, monkeypatch):
    """Runs compared that need other memory than the table says, or that learn something else."""
    monkeypatch.chdir(tmp_path)
    measured = compression.measure(quick=True)
    assert [row["what"] for row in measured.rows[:-1]] == [*compression.QUICK, compression.EQUAL]
    assert [bar.name for bar in measured.bars if not bar.holds] == []
    assert all(row["tokens/s"] > 0 for row in measured.rows[:-1])
