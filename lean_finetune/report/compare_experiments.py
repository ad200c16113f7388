"""Print experiments as a table with the change of their loss; reads `dvc exp show --csv` from stdin."""

import csv
import sys
from collections.abc import Iterator, Mapping, Sequence

LOSS = "tuned_loss"
CHANGE = "loss_change"
RESULTS = ("peak_gib_predicted", "peak_gib_measured", "tokens_per_second", LOSS, CHANGE)
"""Columns after the name, so that they are seen in a terminal of 120 columns; what changed and other metrics follow."""
OTHER_LOSS = ("model.", "data.")
"""Start of the parameters that decide what a loss is of: losses of different models or data cannot be subtracted."""
NAME = "Experiment"
UNNAMED = ("workspace", "baseline")
"""Rows that DVC does not name: the workspace, then the commit that experiments start from."""
DIGITS = 4


def with_change(rows: Sequence[Mapping[str, str]]) -> Iterator[dict[str, str]]:
    """Yield rows with a name and the loss minus the baseline's; empty if unknown, or of another model or other data."""
    names = iter(UNNAMED)
    # Without experiments DVC leaves the column of names out.
    named = [{**row, NAME: row.get(NAME) or next(names, UNNAMED[-1])} for row in rows]
    baseline = next((row for row in named if row[NAME] == UNNAMED[-1]), {})
    for row in named:
        loss, before = (_number(one.get(LOSS, "")) for one in (row, baseline))
        same = all(row[name] == baseline.get(name) for name in row if name.startswith(OTHER_LOSS))
        change = f"{loss - before:+.{DIGITS}g}" if same and loss is not None and before is not None else ""
        shown = {name: _rounded(value) for name, value in {**row, CHANGE: change}.items()}
        first = [name for name in (NAME, *RESULTS) if name in row or (name == CHANGE and LOSS in row)]
        parameters = [name for name in row if "." in name or name == "seed"]
        rest = [name for name in row if name not in (*first, *parameters)]
        yield {name: shown[name] for name in (*first, *parameters, *rest)}


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return rows as aligned columns."""
    columns = list(rows[0])
    widths = [max(len(column), *(len(row[column]) for row in rows)) for column in columns]
    lines = [columns, *([row[column] for column in columns] for row in rows)]
    padded = ([f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)] for line in lines)
    return "\n".join("  ".join(line).rstrip() for line in padded)


def _rounded(value: str) -> str:
    """Shorten a decimal number; other text is unchanged."""
    number = _number(value)
    return value if number is None or value.startswith("+") else f"{number:.{DIGITS}g}"


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
