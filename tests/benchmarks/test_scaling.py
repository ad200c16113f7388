"""The model of many GPUs: what it says of cases that can be reckoned by hand."""

import pytest

from benchmarks.scaling import BYTES_PER_WEIGHT, FLOPS, TOKENS_PER_GPU, WEIGHTS, scaling


def by_name() -> dict:
    return {row["what"]: row for row in scaling()}


def test_bytes_are_those_of_rings():
    """DDP sends what it sums twice, less what is its own; zero3 gathers twice and scatters once."""
    held = WEIGHTS * BYTES_PER_WEIGHT
    rows = by_name()
    assert rows["model: ddp on 8 GPUs"]["sent_bytes"] == pytest.approx(2 * held * 7 / 8)
    assert rows["model: zero3 on 64 GPUs"]["sent_bytes"] == pytest.approx(3 * held * 63 / 64)


def test_one_node_in_a_group_is_zero3_within_it_and_wins_across_nodes():
    rows = by_name()
    assert rows["model: hsdp on 8 GPUs"]["sent_bytes"] == rows["model: zero3 on 8 GPUs"]["sent_bytes"]
    for gpus in (64, 256, 1024):
        assert rows[f"model: hsdp on {gpus} GPUs"]["efficiency"] > rows[f"model: zero3 on {gpus} GPUs"]["efficiency"]


def test_what_is_waited_for_is_what_does_not_hide_behind_computing():
    compute = 6 * WEIGHTS * TOKENS_PER_GPU / FLOPS
    row = by_name()["model: zero3 on 1024 GPUs"]
    assert 0 < row["waited_s"] < row["communication_s"]
    assert row["efficiency"] == pytest.approx(compute / (compute + row["waited_s"]))
