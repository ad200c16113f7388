"""Byte counts formatted for people."""

import pytest

from cuda_memory.units import GIB, MIB, counted, readable_size, reading_unit


@pytest.mark.parametrize(
    ("count", "unit"),
    [(0, "B"), (4, "B"), (3755, "KiB"), (200 << 10, "MiB"), (100 << 20, "MiB"), (103 << 20, "GiB"), (1 << 40, "GiB")],
)
def test_a_byte_count_is_shown_in_a_unit_that_fits_it(count, unit):
    """Not as `3.8e-06 GiB`."""
    assert reading_unit(count)[1] == unit


def test_a_size_has_four_digits_and_no_trailing_zeros():
    """No difference is rounded away, and a small run is not `0.00 GiB`."""
    sizes = (round(22.08 * GIB), 24 * GIB, 5 * MIB, 0)
    assert [readable_size(size) for size in sizes] == ["22.08 GiB", "24 GiB", "5 MiB", "0 B"]


def test_a_count_agrees_with_its_noun():
    """`1 rows`."""
    assert [counted(count, "row") for count in (0, 1, 4747)] == ["0 rows", "1 row", "4,747 rows"]
    assert counted(2, "micro-batch") == "2 micro-batches" and counted(2, "process") == "2 processes"
    assert counted(1, "entry", "entries") == "1 entry" and counted(2, "entry", "entries") == "2 entries"
