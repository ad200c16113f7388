"""Reserved memory by the order of the batches."""

import pytest

from benchmarks.staircase import draw, staircase
from cuda_memory.units import GIB


@pytest.mark.slow
def test_reserved_memory_grows_with_ascending_lengths_and_is_constant_with_the_largest_batch_first(tmp_path):
    found = staircase()
    reserved = {key: [step.reserved_bytes / GIB for step in run.steps] for key, run in found.items()}
    ascending = reserved["ascending", "native"]
    assert ascending == sorted(set(ascending)), "grows with every batch"
    last = {order: round(steps[-1]) for (order, kind), steps in reserved.items() if kind == "native"}
    assert last == {"ascending": 40, "random": 14, "descending": 10, "planned": 10}
    assert max(step.allocated_peak_bytes for step in found["ascending", "native"].steps) < 9 * GIB
    assert all(max(steps) < 10 for (_, kind), steps in reserved.items() if kind == "expandable")
    for order in ("descending", "planned"):
        steps = reserved[order, "native"]
        assert max(steps) - steps[0] < 0.05, "constant from the first step"
    draw(found, tmp_path / "staircase.png")
    assert (tmp_path / "staircase.png").stat().st_size > 10_000
