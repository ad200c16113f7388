"""The staircase by order of the batches: the first case this project set out from."""

import pytest

from benchmarks.staircase import draw, fitted, staircase


@pytest.mark.slow
def test_memory_climbs_with_ascending_lengths_and_is_flat_as_planned(tmp_path):
    """A replay in which the order of the batches does not matter, or a plan that climbs all the same."""
    found = staircase(fitted())
    reserved = {key: [step.reserved_bytes for step in run.steps] for key, run in found.items()}
    held = max(step.allocated_peak_bytes for step in found["ascending", "native"].steps)
    last = {order: reserved[order, "native"][-1] for order in ("ascending", "random", "descending", "planned")}
    assert last["ascending"] > 10 * held
    assert last["ascending"] > last["random"] > last["descending"] >= last["planned"]
    assert all(reserved[order, "expandable"][-1] < 1.2 * held for order in last)
    assert max(reserved["planned", "native"]) < 1.01 * reserved["planned", "native"][0]
    draw(found, tmp_path / "staircase.png")
    assert (tmp_path / "staircase.png").stat().st_size > 10_000
