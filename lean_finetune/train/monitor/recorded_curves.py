"""Read a recorded memory curve, of this pipeline or another tool, and explain its growth."""

import csv
import math
from pathlib import Path

from lean_finetune.core.errors import UserError
from lean_finetune.core.units import GIB, MIB
from lean_finetune.train.monitor.growth import LIVE, OWN, PEAK, RESERVED, RESIDENT, RETRIES, SHAPES, classify
from lean_finetune.train.monitor.growth_advice import growth_line

STEP = "step"
MEMORY_NAMES = {
    "allocated": PEAK,
    "held": LIVE,
    "reserved": RESERVED,
    "held_reserved": RESERVED,
    "rss": RESIDENT,
    "rss_own": OWN,
}
"""Memory columns without the suffix of their unit."""
UNITS = {"_bytes": 1, "_mib": MIB, "_gib": GIB}
COLUMNS = {name + suffix: (column, size) for name, column in MEMORY_NAMES.items() for suffix, size in UNITS.items()} | {
    name: (name, 1) for name in (STEP, RETRIES, *SHAPES)
}
"""Column and unit by the name in a header."""

Row = dict[str, float | None]


def read_recorded(path: Path) -> list[Row]:
    """Read a CSV file with a header that has `step` and at least one of `COLUMNS`; ignore other columns.

    Raises:
        UserError: the file cannot be read; with its line.
    """
    rows: list[Row] = []
    try:
        with open(path, newline="", encoding="utf-8") as file:
            lines = csv.reader(file, strict=True)
            columns = _columns(path, next(lines, []))
            for cells in lines:
                rows.append(_row(f"{path}:{lines.line_num}", columns, cells, rows))
    except OSError as error:
        raise UserError(f"{path}: must be a CSV file that can be read; {error.strerror}; name another") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: must be a CSV file in UTF-8; {error}; write it again") from None
    if not rows:
        raise UserError(f"{path}: must have a line for each step; got a header only; record a run")
    return rows


def _columns(path: Path, header: list[str]) -> list[tuple[str, int] | None]:
    """Return column and unit of each cell of a line; None for columns that are ignored."""
    columns = [COLUMNS.get(name.strip()) for name in header]
    known = [column[0] for column in columns if column is not None]
    if STEP not in known or not set(known) & set(MEMORY_NAMES.values()):
        raise UserError(
            f"{path}:1: a curve must have the column step and one of {', '.join(n + '_bytes' for n in MEMORY_NAMES)} "
            f"(or _mib, _gib); got {', '.join(header) or 'an empty file'}; rename its columns"
        )
    if twice := sorted(name for name in set(known) if known.count(name) > 1):
        raise UserError(f"{path}:1: a column must be unique; {twice[0]} is given twice; remove one")
    return columns


def _row(place: str, columns: list[tuple[str, int] | None], cells: list[str], before: list[Row]) -> Row:
    """Parse one line; empty cells become None."""
    if len(cells) != len(columns):
        raise UserError(f"{place}: a line must have {len(columns)} cells as the header; got {len(cells)}; correct it")
    known = [(*column, cell) for column, cell in zip(columns, cells, strict=True) if column is not None]
    row: Row = {name: _number(f"{place}: {name}", cell) * unit if cell.strip() else None for name, unit, cell in known}
    step, previous = row[STEP], before[-1][STEP] if before else None
    if step is None:
        raise UserError(f"{place}: step must be a number; the cell is empty; correct it")
    if previous is not None and step <= previous:
        raise UserError(f"{place}: steps must increase; got {step:g} after {previous:g}; sort the lines")
    return row


def _number(place: str, cell: str) -> float:
    """Parse a cell."""
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise UserError(f"{place} must be a number of 0 or more; got {cell.strip()[:40]!r}; correct it")
    return value


def explained(path: Path, left_gib: float | None) -> list[str]:
    """Return one line for each cause of growth in a recorded curve.

    Args:
        path: the curve.
        left_gib: memory still free at its end, to say when a leak exhausts it.

    Raises:
        UserError: the file cannot be read.
    """
    rows = read_recorded(path)
    free_bytes = None if left_gib is None else round(left_gib * GIB)
    return [growth_line(growth, rows, lambda series: free_bytes, {}) for growth in classify(rows)]
