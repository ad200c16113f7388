"""Read a recorded memory curve, of this pipeline or another tool, and explain its growth."""

import csv
import math
from pathlib import Path

from cuda_memory.growth import LIVE, OWN, PEAK, RESERVED, RESIDENT, RETRIES, SHAPES, classify
from cuda_memory.units import GIB, MIB
from lean_finetune.core.errors import UserError
from lean_finetune.train.monitor.growth_advice import growth_line, usual_causes

MEMORY_NAMES = {
    "allocated": PEAK,
    "live": LIVE,
    "reserved": RESERVED,
    "rss": RESIDENT,
    "rss_own": OWN,
}
"""Memory columns without the suffix of their unit."""
UNITS = {"_bytes": 1, "_mib": MIB, "_gib": GIB}
COLUMNS = {name + suffix: (column, size) for name, column in MEMORY_NAMES.items() for suffix, size in UNITS.items()} | {
    name: (name, 1) for name in ("step", RETRIES, *SHAPES)
}
"""Column and unit by the name in a header."""

PIPELINE_COLUMNS = {"supervised_tokens", "padded_tokens", "micro_batches"}
"""By these, a curve is one of stage train."""
ON_DEVICE = (LIVE, PEAK, RESERVED)
RECORD = "record a snapshot of PyTorch's allocator over some steps; `lean-finetune snapshot --help` says how"

MOST_BYTES = 1 << 28
"""About a million steps."""

Row = dict[str, float | None]


def read_recorded(path: Path) -> list[Row]:
    """Read a CSV file with a header that has `step` and at least one of `COLUMNS`; ignore other columns.

    Raises:
        UserError: the file cannot be read; with its line.
    """
    rows: list[Row] = []
    try:
        if path.stat().st_size > MOST_BYTES:
            raise UserError(f"{path}: a curve must have at most {MOST_BYTES} bytes; got {path.stat().st_size}; cut it")
        with open(path, newline="", encoding="utf-8-sig") as file:
            lines = csv.reader(file, strict=True)
            header = [name.strip() for name in next(lines, [])]
            names = [COLUMNS[name][0] for name in header if name in COLUMNS]
            if "step" not in names or not set(names) & set(MEMORY_NAMES.values()) or len(set(names)) < len(names):
                raise UserError(
                    f"{path}:1: a curve must have the column step and one or more of "
                    f"{', '.join(n + '_bytes' for n in MEMORY_NAMES)} (or _mib, _gib), each once; got "
                    f"{', '.join(header) or 'an empty file'}; rename its columns"
                )
            for cells in lines:
                rows.append(_row(f"{path}:{lines.line_num}", header, cells, rows[-1]["step"] if rows else None))
    except OSError as error:
        raise UserError(f"{path}: must be a CSV file that can be read; {error.strerror}; name another") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: must be a CSV file in UTF-8; {error}; write it again") from None
    if not rows:
        raise UserError(f"{path}: must have a line for each step; got a header only; record a run")
    return rows


def _row(place: str, header: list[str], cells: list[str], step_before: float | None) -> Row:
    """Parse one line; empty cells become None."""
    if len(cells) != len(header):
        raise UserError(f"{place}: a line must have {len(header)} cells as the header; got {len(cells)}; correct it")
    row: Row = {}
    for name, cell in zip(header, cells, strict=True):
        if name not in COLUMNS:
            continue
        column, unit = COLUMNS[name]
        try:
            value = float(cell) if cell.strip() else None
        except ValueError:
            value = math.nan
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise UserError(f"{place}: {column} must be a number of 0 or more; got {cell.strip()[:40]!r}; correct it")
        row[column] = None if value is None else value * unit
    step = row["step"]
    if step is None or (step_before is not None and step <= step_before):
        raise UserError(f"{place}: steps must increase; got {step} after {step_before}; sort the lines")
    return row


def explained(path: Path, left_gib: float | None) -> list[str]:
    """Return one line for each cause of growth in a recorded curve, and usual causes if it is another program's.

    With `left_gib`, the memory still free at its end, the line of a leak says when it is used up.
    """
    rows = read_recorded(path)
    free_bytes = None if left_gib is None else round(left_gib * GIB)
    with open(path, newline="", encoding="utf-8-sig") as file:
        ours = PIPELINE_COLUMNS <= {name.strip() for name in next(csv.reader(file))}
    lines = []
    for growth in classify(rows):
        lines.append(growth_line(growth, rows, free_bytes, {} if ours else None))
        if not ours and (causes := usual_causes(growth)):
            lines += ["usual causes:", *(f"  {cause}" for cause in causes)]
            if growth.series in ON_DEVICE:
                lines.append(f"the lines of code: {RECORD}")
    return lines
