"""Bytes for people: counted in bytes everywhere, turned into GiB and the like only where they are printed."""

MIB = 2**20
GIB = 2**30
UNITS = ((GIB, "GiB"), (MIB, "MiB"), (2**10, "KiB"), (1, "B"))


def reading_unit(count: int) -> tuple[int, str]:
    """The unit in which so many bytes are best read, and its name: the largest that gives 0.1 or more."""
    return next(((size, name) for size, name in UNITS if 10 * count >= size), UNITS[-1])


def readable_size(count: int) -> str:
    """Bytes for reading, to four digits in their best unit: `22.08 GiB`, `3.5 MiB`."""
    divisor, unit = reading_unit(count)
    return f"{count / divisor:.4g} {unit}"
