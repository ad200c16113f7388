"""Print experiments as a table with the change of their loss; reads `dvc exp show --csv` from stdin."""

import csv
import sys
from collections.abc import Iterator, Mapping, Sequence

LOSS = "tuned_loss"
CHANGE = "loss_change"
NAME = "Experiment"
UNNAMED = ("workspace", "baseline")
"""Rows that DVC does not name: the workspace, then the commit that experiments start from."""
DIGITS = 4


def with_change(rows: Sequence[Mapping[str, str]]) -> Iterator[dict[str, str]]:
    """Yield rows with a name and a column of the loss minus the baseline's; empty if unknown."""
    names = iter(UNNAMED)
    named = [{**row, NAME: row[NAME] or next(names, UNNAMED[-1])} for row in rows]
    baseline = next((_number(row.get(LOSS, "")) for row in named if row[NAME] == UNNAMED[-1]), None)
    for row in named:
        loss = _number(row.get(LOSS, ""))
        change = "" if loss is None or baseline is None else f"{loss - baseline:+.{DIGITS}g}"
        changed: dict[str, str] = {}
        for column, value in row.items():
            number = _number(value)
            changed[column] = value if number is None else f"{number:.{DIGITS}g}"
            if column == LOSS:
                changed[CHANGE] = change
        yield changed


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return rows as aligned columns."""
    columns = list(rows[0])
    widths = [max(len(column), *(len(row[column]) for row in rows)) for column in columns]
    lines = [columns, *([row[column] for column in columns] for row in rows)]
    padded = ([f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)] for line in lines)
    return "\n".join("  ".join(line).rstrip() for line in padded)


def _number(value: str) -> float | None:
    """Parse a decimal number; None for text, integers and empty cells."""
    try:
        return float(value) if set(value) & set(".e") else None
    except ValueError:
        return None


if __name__ == "__main__":
    found = list(csv.DictReader(sys.stdin))
    if not found:
        sys.exit("error: dvc exp show: printed no experiments; see its message above")
    print(table(list(with_change(found))))
