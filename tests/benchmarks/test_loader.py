"""The loader benchmark: its token files, its figures, and a bar that a difference in bits breaks."""

import numpy as np
import pytest

from benchmarks import loader
from lean_finetune.step.token_rows import TokenRows


@pytest.fixture
def quick(monkeypatch):
    """Fewer rows still."""
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


def test_another_bit_breaks_the_bar(quick, monkeypatch):
    original = loader.rival_batches

    def off_by_one(dataset, source):
        for batch in original(dataset, source):
            batch.input_ids_BT[0, 5] += 1
            yield batch

    monkeypatch.setattr(loader, "rival_batches", off_by_one)
    assert not any(bar.holds for bar in loader.measure(quick=True).bars)


def test_generated_rows_have_the_lengths_of_chat_rows(tmp_path):
    loader.write_tokens(tmp_path, 5000)
    tokens = TokenRows(tmp_path, "train")
    assert len(tokens) == 5000
    assert tokens.lengths.mean() == pytest.approx(loader.MEAN_TOKENS, rel=0.1)
    assert tokens.lengths.max() <= loader.LONGEST and tokens.lengths.max() > 8 * np.median(tokens.lengths)
    assert all(len(tokens.spans(row)) == 2 for row in range(0, 5000, 450))
