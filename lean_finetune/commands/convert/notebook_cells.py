"""The code of a notebook of Jupyter, cell by cell, without commands of IPython and of the shell."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lean_finetune.core.errors import UserError

NOTEBOOK = ".ipynb"
MOST_NOTEBOOK_BYTES = 1 << 26
"""With its outputs, such as pictures."""
TIMED = re.compile(r"%%(time|timeit|capture)\b")
"""Commands whose cell is Python all the same."""
OTHER_CELL = re.compile(r"\s*%%\w")
COMMAND = re.compile(r"\s*(!|%{1,2}[a-zA-Z]|\?)|.*[\w\])]\?{1,2}\s*$")
TIMED_LINE = re.compile(r"(\s*)%(?:time|timeit)\s+(.*)")
SHELL_VALUE = re.compile(r"(\s*[\w, ]+=\s*)[!%].*")
OF_TRAINING = re.compile(r"Trainer|Config\b|TrainingArguments|from_pretrained|get_peft_model")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A part of a notebook, or a complete script."""

    code: str
    number: int | None = None
    """Counted from 1 among all cells; None for a script."""

    @property
    def may_be_left_out(self) -> bool:
        """Whether nothing in it configures a run, so that an error in it does not matter."""
        return self.number is not None and OF_TRAINING.search(self.code) is None

    def line(self, number: int) -> int | str:
        """How a line is named."""
        return number if self.number is None else f"cell {self.number}, line {number}"


def cells_of(path: Path, text: str) -> list[Cell]:
    """The cells with code.

    Raises:
        UserError: the file is no notebook.
    """
    try:
        found = [
            (number, "".join(cell["source"]))
            for number, cell in enumerate(json.loads(text)["cells"], 1)
            if cell["cell_type"] == "code"
        ]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"{path}: must be a notebook of Jupyter; name another file") from None
    cells = ((number, TIMED.sub("#", code.lstrip(), count=1)) for number, code in found)
    return [
        Cell(code="\n".join(_python_lines(code)), number=number) for number, code in cells if not OTHER_CELL.match(code)
    ]


def _python_lines(code: str) -> Iterator[str]:
    """Lines of code, with `pass` for commands and empty lines for their continuations."""
    continued = False
    for line in code.split("\n"):
        is_command = not continued and COMMAND.match(line) is not None
        if continued:
            yield ""
        elif timed := TIMED_LINE.fullmatch(line):
            yield timed[1] + timed[2]
        elif is_command:
            yield line[: len(line) - len(line.lstrip())] + "pass"
        elif assigned := SHELL_VALUE.fullmatch(line):
            yield f"{assigned[1]}__command__()"
        else:
            yield line
        continued = (continued or is_command) and line.rstrip().endswith("\\")
