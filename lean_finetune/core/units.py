"""Format byte counts for people. All other code computes in bytes."""

MIB = 2**20
GIB = 2**30
UNITS = ((GIB, "GiB"), (MIB, "MiB"), (2**10, "KiB"), (1, "B"))


def reading_unit(count: int) -> tuple[int, str]:
    """The largest unit in which a count is at least 0.1, and its name."""
    return next(((size, name) for size, name in UNITS if 10 * count >= size), UNITS[-1])


def readable_size(count: int) -> str:
    """A byte count with four digits in its best unit: `22.08 GiB`, `3.5 MiB`."""
    divisor, unit = reading_unit(count)
    return f"{count / divisor:.4g} {unit}"
