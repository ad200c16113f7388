"""Sizes as people read them."""

import pytest

from lean_finetune.core.units import GIB, MIB, readable_size, reading_unit


@pytest.mark.parametrize(
    ("count", "unit"),
    [(0, "B"), (4, "B"), (3755, "KiB"), (200 << 10, "MiB"), (100 << 20, "MiB"), (103 << 20, "GiB"), (1 << 40, "GiB")],
)
def test_bytes_are_read_in_a_fitting_unit(count, unit):
    """`3.8e-06 GiB` tells a person nothing."""
    assert reading_unit(count)[1] == unit


def test_a_size_keeps_four_digits_and_no_zeros_without_meaning():
    """A difference rounded away, or the `0.00 GiB` of a small run."""
    assert [readable_size(n) for n in (round(22.08 * GIB), 24 * GIB, 5 * MIB, 0)] == [
        "22.08 GiB",
        "24 GiB",
        "5 MiB",
        "0 B",
    ]
