"""Errors that a user can correct, printed in one line without a traceback."""

import logging

from cuda_memory.errors import UsageFault as UsageFault
from cuda_memory.errors import UserError
from cuda_memory.terminal import visible_line

# On import, bitsandbytes warns about an optional inference kernel that no stage uses. Every entry imports this module
# before bitsandbytes.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
LONGEST_LINE = 600
"""Characters of a message that quotes data."""
LONGEST_VALUE = 80
"""Characters of a value in a message."""


class DoesNotFit(UserError):
    """The run needs more memory than there is: by the prediction, by what is free, or because memory ran out."""

    exit_code = 3


def shortened(text: str, most: int = LONGEST_VALUE) -> str:
    """A value for a message, of at most `most` characters."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def one_line(text: str) -> str:
    """A text as one line of at most LONGEST_LINE characters, escaped."""
    return shortened(visible_line(text[: 2 * LONGEST_LINE]), LONGEST_LINE)


class RowFault(Exception):
    """A row that cannot be used: the rule and the remedy, as one line. The caller adds file and line."""

    def __init__(self, rule: str):
        super().__init__(one_line(rule))
