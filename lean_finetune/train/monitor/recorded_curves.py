"""A recorded curve of memory, of this pipeline's or of another tool, and what its growth means."""

import csv
import math
from pathlib import Path

from lean_finetune.core.errors import UserError
from lean_finetune.core.units import GIB, MIB
from lean_finetune.train.monitor.growth import HELD, OWN, PEAK, RESERVED, RESIDENT, RETRIES, SHAPES, classify
from lean_finetune.train.monitor.growth_advice import growth_line

STEP = "step"
MEMORY_NAMES = {
    "allocated": PEAK,
    "held": HELD,
    "reserved": RESERVED,
    "held_reserved": RESERVED,
    "rss": RESIDENT,
    "rss_own": OWN,
}
"""Columns of memory, each with the ending of its unit."""
UNITS = {"_bytes": 1, "_mib": MIB, "_gib": GIB}

Row = dict[str, float | None]


def read_recorded(path: Path) -> list[Row]:
    """Rows of a CSV with a header: `step`, memory by `MEMORY_NAMES` and `UNITS`, shapes by `SHAPES`; others are left.

    Raises:
        UserError: the file cannot be read as that; with its line.
    """
    try:
        with open(path, newline="", encoding="utf-8") as file:
            lines = csv.reader(file, strict=True)
            columns = _columns(path, next(lines, []))
            rows: list[Row] = []
            for cells in lines:
                place = f"{path}:{lines.line_num}"
                rows.append(_row(place, columns, cells))
                _check_step(place, rows[-2:])
    except OSError as error:
        raise UserError(f"{path}: must be a CSV file that can be read; {error.strerror}; name another") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: must be a CSV file in UTF-8; {error}; write it anew") from None
    if not rows:
        raise UserError(f"{path}: must hold a line for each step; got a header alone; record a run")
    return rows


def _columns(path: Path, header: list[str]) -> list[tuple[str, int] | None]:
    """For each cell of a line, the column it is read as and its unit in bytes (1 for no bytes), or None."""
    names = {name + ending: (column, size) for name, column in MEMORY_NAMES.items() for ending, size in UNITS.items()}
    names |= {name: (name, 1) for name in (STEP, RETRIES, *SHAPES)}
    columns = [names.get(name.strip()) for name in header]
    known = [column[0] for column in columns if column is not None]
    if STEP not in known or not set(known) & set(MEMORY_NAMES.values()):
        raise UserError(
            f"{path}:1: a curve must have the column step and one of {', '.join(n + '_bytes' for n in MEMORY_NAMES)} "
            f"(or _mib, _gib); got {', '.join(header) or 'an empty file'}; rename its columns"
        )
    if twice := sorted(name for name in set(known) if known.count(name) > 1):
        raise UserError(f"{path}:1: a column must stand once; {twice[0]} is given twice; leave one out")
    return columns


def _row(place: str, columns: list[tuple[str, int] | None], cells: list[str]) -> Row:
    """One line's figures; empty cells become None."""
    if len(cells) != len(columns):
        raise UserError(f"{place}: a line must have {len(columns)} cells as the header; got {len(cells)}; mend it")
    row: Row = {}
    for column, cell in zip(columns, cells, strict=True):
        if column is None:
            continue
        name, unit = column
        row[name] = _number(f"{place}: {name}", cell) if cell.strip() else None
        if row[name] is not None:
            row[name] *= unit  # type: ignore[operator]
    return row


def _check_step(place: str, last_two: list[Row]) -> None:
    """Refuse a step that is not after the one before."""
    steps = [row[STEP] for row in last_two]
    if None in steps:
        raise UserError(f"{place}: step must be a number; the cell is empty; mend it")
    if len(steps) == 2 and steps[1] <= steps[0]:  # type: ignore[operator]
        raise UserError(f"{place}: steps must rise; got {steps[1]:g} after {steps[0]:g}; sort the lines")


def _number(place: str, cell: str) -> float:
    """A cell as a number."""
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise UserError(f"{place} must be a number of 0 or more; got {cell.strip()[:40]!r}; mend it")
    return value


def explained(path: Path, left_gib: float | None) -> list[str]:
    """One line for each cause of growth in a recorded curve.

    Args:
        path: the curve.
        left_gib: memory that was still free at its end, to say when a leak spends it.

    Raises:
        UserError: the file cannot be read.
    """
    rows = read_recorded(path)
    left = None if left_gib is None else round(left_gib * GIB)
    return [growth_line(growth, rows, lambda series: left, {}) for growth in classify(rows)]
