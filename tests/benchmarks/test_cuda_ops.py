"""The comparison of a recorded step with its trace: what counts as explained, and that the QLoRA step is."""

from pathlib import Path

import pytest

from benchmarks.cuda_ops.__main__ import EXPLAINED_PERCENT, compared, measure, peak_of
from benchmarks.cuda_ops.traced_step import Allocation
from lean_finetune.core.errors import UserError

TRACES = Path(__file__).parents[3] / "shared" / "facts" / "cuda_traces"


def changes(*sizes: int, operation: str = "forward mm") -> list[Allocation]:
    return [Allocation(bytes=size, operation=operation) for size in sizes]


def test_an_allocation_of_another_size_or_place_is_not_explained():
    """A total that is right by accident, since the sequence is another."""
    recorded, traced = changes(8, 16, -8, 32, operation="modeling.py:7 forward"), changes(8, 32, 64)
    rows = {row["operation"]: row for row in compared("r", recorded, traced)}
    assert rows["forward mm"]["explained_bytes"] == 8 + 32
    missed = rows["not explained: 16 bytes at modeling.py:7 forward"]
    assert (missed["recorded_bytes"], missed["explained_bytes"], missed["allocations"]) == (16, 0, 1)
    assert rows["only in the trace"]["explained_bytes"] == 64
    assert [peak_of(recorded), peak_of(traced)] == [48, 104]


def test_missing_recordings_are_refused_in_one_line(tmp_path):
    with pytest.raises(UserError, match=r"^--traces: .*tinyllama_qlora_1x1000.csv.gz is missing; name the directory"):
        measure(quick=True, traces=tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(not TRACES.exists(), reason="the recordings are not part of the repository")
def test_the_trace_explains_a_real_qlora_step():
    """A rule of CUDA's kernels that differs from what a GPU allocated."""
    measured = measure(quick=True, traces=TRACES)
    total = measured.rows[-1]
    assert total["explained_percent"] > EXPLAINED_PERCENT
    assert total["peak_traced_bytes"] == total["peak_recorded_bytes"]
