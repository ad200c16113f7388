"""Units, and how sizes, counts, times and labelled lines are printed. All other code computes in bytes and seconds."""

import textwrap
from collections.abc import Iterable

MIB = 2**20
GIB = 2**30
TIMES = ((86400.0, "days"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))
UNITS = ((GIB, "GiB"), (MIB, "MiB"), (2**10, "KiB"), (1, "B"))


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def reading_unit(count: int) -> tuple[int, str]:
    """The largest unit in which a count is at least 0.1, and its name."""
    return next(((size, name) for size, name in UNITS if 10 * count >= size), UNITS[-1])


def significant(value: float, digits: int) -> str:
    """A number of at least 0.0001 rounded to this many digits, without an exponent: `100`, `0.25`."""
    return f"{float(f'{value:.{digits}g}'):.15g}"


def readable_size(count: int) -> str:
    """A byte count with four digits in its best unit: `22.08 GiB`, `3.5 MiB`."""
    divisor, unit = reading_unit(count)
    return f"{significant(count / divisor, 4)} {unit}"


def readable_sizes(counts: Iterable[int | None]) -> list[str | None]:
    """Byte counts in the unit of the largest, for a column: `0.1172 GiB`, `0.01 GiB`; None stays."""
    found = list(counts)
    divisor, unit = reading_unit(max((count for count in found if count is not None), default=0))
    return [None if count is None else f"{_in_unit(count / divisor)} {unit}" for count in found]


def _in_unit(value: float) -> str:
    """A number of four digits; one that is too small for four decimals is named by its bound."""
    return significant(value, 4) if value == 0 or value >= 0.0001 else "< 0.0001"


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """A count with its noun: `1 row`, `4,747 rows`, `2 processes`."""
    if count == 1:
        return f"1 {noun}"
    ending = "es" if noun.endswith(("s", "x", "ch")) else "s"
    return f"{count:,} {plural or noun + ending}"


def readable_time(seconds: float) -> str:
    """Seconds with two digits: `1.5 h`."""
    size, unit = next((time for time in TIMES if seconds >= 2 * time[0]), TIMES[-1])
    return f"{significant(seconds / size, 2)} {unit}"


def readable_times(low: float, high: float) -> str:
    """A range of seconds with two digits in one unit: `1.5 to 5.2 h`."""
    size, unit = next((time for time in TIMES if high >= 2 * time[0]), TIMES[-1])
    return f"{significant(low / size, 2)} to {significant(high / size, 2)} {unit}"


COLUMNS = 80
LABEL_WIDTH = 21
BAR_WIDTH = 32
EIGHTHS = " ▏▎▍▌▋▊▉"
"""Left parts of a character cell, by eighths."""


def labelled(label: str, text: str, width: int = LABEL_WIDTH) -> str:
    """A labelled text, wrapped below itself. `width` columns are for the label."""
    return textwrap.fill(
        text,
        COLUMNS,
        initial_indent=f"{label:<{width}}",
        subsequent_indent=" " * width,
        break_long_words=False,
        break_on_hyphens=False,
    )


def bar_line(label: str, count: int, whole: int) -> str:
    """A labelled bar for a share of `whole` bytes, and the bytes."""
    eighths = round(8 * BAR_WIDTH * count / whole)
    bar = "█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()
    return f"  {label:<{LABEL_WIDTH}}{bar:<{BAR_WIDTH}} {readable_size(count):>10}"
