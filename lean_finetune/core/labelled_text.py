"""Text of the commands: at most 80 columns, labels on the left."""

import textwrap

COLUMNS = 80
LABEL_WIDTH = 21


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
