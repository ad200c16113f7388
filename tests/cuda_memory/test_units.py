"""Byte counts formatted for people."""

import pytest

from cuda_memory.units import GIB, MIB, counted, readable_size, readable_time, readable_times, reading_unit, significant


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


def test_a_time_of_three_digits_has_no_exponent():
    """`1e+02 s a step`."""
    assert [readable_time(seconds) for seconds in (99.6, 100, 119, 81, 0.25)] == [
        "100 s",
        "100 s",
        "120 s",
        "81 s",
        "0.25 s",
    ]
    assert readable_time(8.64e6) == "100 days" and readable_times(3600, 119 * 3600) == "0.042 to 5 days"
    assert [significant(number, 3) for number in (1234.5, 999.6, 7)] == ["1230", "1000", "7"]
    assert readable_size(99999 * GIB) == "100000 GiB"
