"""The loader benchmark: every way is measured, and a different bit breaks its bar."""

import pytest

from benchmarks import loader


@pytest.fixture
def quick(monkeypatch):
    """Fewer rows than --quick."""
    monkeypatch.setattr(loader, "QUICK_ROWS", 1200)
    monkeypatch.setattr(loader, "QUICK_BATCHES", 3)


def test_a_quick_run_measures_every_way_and_finds_equal_bits(quick):
    measured = loader.measure(quick=True)
    ways = ["ours, 0 threads", "ours, 1 threads", loader.HF, "resume"]
    assert [(row["mode"], row["what"]) for row in measured.rows] == [
        (mode, way) for mode in loader.MODES for way in ways
    ]
    assert all(row["ms"] > 0 for row in measured.rows)
    assert all(bar.holds for bar in measured.bars) and len(measured.bars) == 2


def test_a_different_bit_breaks_the_bar(quick, monkeypatch):
    original = loader.rival_batches

    def off_by_one(dataset, source):
        for batch in original(dataset, source):
            batch.input_ids_BT[0, 5] += 1
            yield batch

    monkeypatch.setattr(loader, "rival_batches", off_by_one)
    assert not any(bar.holds for bar in loader.measure(quick=True).bars)
