"""Text of the commands: at most 80 columns, labels on the left."""

import textwrap

from cuda_memory.units import readable_size

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
