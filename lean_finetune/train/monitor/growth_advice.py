"""Say what grew, during a run or from its recorded curves."""

import csv
import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cuda_memory.growth import (
    KERNEL_SHAPES,
    LIVE,
    OWN,
    PEAK,
    RESERVED,
    RESIDENT,
    RETRIES,
    SHAPES,
    Cause,
    Growth,
    Rows,
    classify,
)
from cuda_memory.units import GIB, MIB, counted, readable_size
from lean_finetune.core.errors import UserError

FIRST_CHECK_STEPS, CHECK_FACTOR = 20, 1.5
"""Check after 20 steps, then whenever the run is half as long again: few chances of a false alarm, bounded cost."""
REMEDIES: Mapping[Cause, str] = {
    "jump": "something was allocated there and is still referenced; memory is flat before and after",
    "steady": "it does not grow any more, nothing to do",
    "kernels": "on a CPU in 16 bits oneDNN keeps the kernels of its last 1,024 products, about 0.5 GiB, and malloc up "
    "to as much in pieces between them: it ends by itself, nothing to do. MALLOC_MMAP_THRESHOLD_=131072 in the "
    "environment avoids malloc's part",
}
"""Remedies of the causes for which no setting helps."""
SMALL_SHARE = 0.05
"""Growth over a run that no one needs to explain: a run that fits has room for more."""
UNTIL_DOUBLED = "after twice as many steps the first has ended, and the second has not"
Settings = Mapping[str, Any]
"""Parameters of the run by dotted name; empty where they are unknown, as for a recorded curve."""
KEPT_ON_DEVICE = (
    "`total += loss` without .item(): keeps each step's graph, and its activations if backward does not free them",
    "losses, logits or model outputs kept in a list or an attribute: store .item() or .detach().cpu()",
    "a list or dictionary of tensors that grows, such as metrics or a cache by batch",
    "a forward for evaluation without torch.no_grad(), or backward(retain_graph=True)",
    "hooks that are registered in every step and never removed",
)
KEPT_ON_HOST = (
    "a list or dictionary that grows: losses, metrics, texts, logged images",
    "`total += loss` without .item(): keeps each step's graph, whose nodes are in RAM",
    "a DataLoader with workers over a large list of Python objects: reading copies its pages into each worker",
    "figures or runs of a tracker that are never closed",
)
USUAL_CAUSES: Mapping[Cause, tuple[str, ...]] = {
    "fragmentation": (
        "batches of ever other lengths: pad them to a few lengths, or to multiples of 64 tokens",
        "blocks of fixed size: set PYTORCH_ALLOC_CONF=expandable_segments:True in the environment",
        "evaluation or generation between steps, whose blocks stay cached between those of training",
    ),
    "length": (
        "longer rows come later: truncate them, or run the longest batch first to see the peak at once",
        "batches of a fixed number of rows: limit the tokens of a batch instead",
    ),
    "kernels": (REMEDIES["kernels"],),
    "jump": (
        "the optimizer's state, allocated by its first update",
        "an evaluation, a generation or a saved checkpoint whose outputs or copies are kept",
        "a longer batch, whose blocks stay cached (reserved memory only)",
    ),
}
"""In programs that are not this pipeline; of a leak see `usual_causes`."""


def usual_causes(growth: Growth) -> tuple[str, ...]:
    """What usually causes this growth in a program that is not this pipeline; empty where nothing is to be done."""
    if growth.jumps is not None:
        return USUAL_CAUSES["jump"]
    if growth.cause == "leak":
        return KEPT_ON_HOST if growth.series in (OWN, RESIDENT) else KEPT_ON_DEVICE
    return USUAL_CAUSES.get(growth.cause, ())


def check_is_due(steps: int) -> bool:
    """Whether the curves are checked after this number of steps."""
    due = FIRST_CHECK_STEPS
    while due < steps:
        due = round(due * CHECK_FACTOR)
    return due == steps


def growth_line(growth: Growth, rows: Rows, free_bytes: int | None, settings: Settings | None) -> str:
    """Return one line with cause, figures, confidence and remedy of a finding in `rows`.

    `free_bytes` is the memory that is left for its series, None if unknown. Remedies in `settings` are not proposed;
    without settings the run is another program's, and no parameter of ours is.
    """
    if growth.series is None:
        return f"too short: {counted(len(rows), 'step')} with memory; record more steps"
    if growth.jumps is not None:
        return f"jump: {growth.series} {growth.jumps}; {REMEDIES['jump']}"
    how = {
        "leak": "grows steadily " + ("at equal batch shape" if growth.at_equal_shape else "(batch shapes unknown)"),
        "fragmentation": "grows beyond the highest peak",
        "length": "grows with batch length",
        "kernels": "grows with new shapes of batches",
    }.get(growth.cause, "grows")
    figures = (
        f"{growth.cause}: {growth.series} {how} by {readable_size(max(0, round(growth.slope_bytes_per_step)))} a step, "
        f"{readable_size(max(0, growth.growth_bytes))} over steps {growth.first_step}-{growth.last_step}"
    )
    if growth.cause == "leak":
        figures += f", confidence {100 * (growth.confidence or 0):.4g} %"
        if free_bytes is not None and growth.slope_bytes_per_step > 0:
            free_bytes = max(0, free_bytes)
            step = growth.last_step + int(free_bytes / growth.slope_bytes_per_step)
            figures += f"; the remaining {readable_size(free_bytes)} are used up at about step {step}"
    if growth.cause == "unclear":
        return f"{figures}; {_either(growth, rows, free_bytes, settings)}"
    if settings is None:
        return figures
    return f"{figures}; {_remedy(growth, rows, settings)}"


def _remedy(growth: Growth, rows: Rows, settings: Settings) -> str:
    """Return what to change: for a leak, what to switch off to find the code that leaks."""
    if growth.cause == "leak":
        kernels = {"train.optimizer": "adamw", "train.attention": "sdpa"}, "uses only PyTorch's kernels"
        threads = {"run.loader_threads": 0}, "runs without the threads that read ahead"
        command = _command(settings, *(kernels if growth.series in (LIVE, PEAK) else threads))
        return f"a step must not leave memory behind, so this is a bug: {command}"
    if growth.cause == "fragmentation":
        if settings.get("train.expandable_segments"):
            one_shape = {"bucket.mode": "packed", "bucket.constant_shape": "true"}
            return _command(settings, one_shape, "gives all batches one shape")
        return _command(settings, {"train.expandable_segments": "true"}, "lets segments grow")
    if growth.cause == "length":
        shape = next(shape for shape in SHAPES if any(row.get(shape) is not None for row in rows))
        parameter = "data.max_length" if shape == "longest_row" else "bucket.max_tokens"
        longest = int(max(row[shape] for row in rows if row.get(shape) is not None))
        return (
            f"`dvc exp run -S bucket.mode=bucketed -S {parameter}={longest}` runs the largest batch first: "
            f"memory is flat after it; a value below {longest} lowers it"
        )
    return REMEDIES[growth.cause]


def _either(growth: Growth, rows: Rows, free_bytes: int | None, settings: Settings | None) -> str:
    """Return the two likeliest causes and what tells them apart, or that nothing needs doing."""
    assert growth.series is not None  # `growth_line` has no other line for it.
    first = next(row[growth.series] for row in rows if row.get(growth.series) is not None)
    if growth.growth_bytes <= SMALL_SHARE * first:
        return f"{100 * growth.growth_bytes / first:.2g} % in all: nothing to do in a run of this length"
    if growth.series in (OWN, RESIDENT):
        text = f"either a cache of a library or of malloc still fills, or each step keeps something: {UNTIL_DOUBLED}"
    elif growth.series == RESERVED:
        text = "either the allocator still adds segments for new sizes, or free memory is in pieces too small: "
        text += UNTIL_DOUBLED
    elif any(len({row.get(shape) for row in rows}) > 1 for shape in SHAPES):
        test = "with batches of one size"
        if settings is not None:
            test = "`dvc exp run -S bucket.mode=packed -S bucket.constant_shape=true` gives batches one size: there"
        text = f"either batches have ever other sizes, or each step keeps tensors: {test} only the second still grows"
    else:
        text = f"either buffers of libraries are still made, or each step keeps tensors: {UNTIL_DOUBLED}"
    if free_bytes is not None and growth.slope_bytes_per_step > 0:
        steps = counted(int(max(0, free_bytes) / growth.slope_bytes_per_step), "step")
        text += f"; at this speed the remaining {readable_size(max(0, free_bytes))} last for {steps}"
    return text


def _command(settings: Settings, changes: Settings, effect: str) -> str:
    """Return a command with the changes that are not set already."""
    # Attention auto is eager only where a model caps its scores, and sdpa would be refused there.
    current = {name: "sdpa" if value == "auto" else value for name, value in settings.items()}
    new = [word for name, value in changes.items() if current.get(name) != value for word in ("-S", f"{name}={value}")]
    return f"`dvc exp run {shlex.join(new)}` {effect}" if new else "please report it with data/train/curves.csv"


# Read a recorded memory curve, of this pipeline or another tool, and explain its growth.

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
    name: (name, 1) for name in ("step", RETRIES, *SHAPES, KERNEL_SHAPES)
}
"""Column and unit by the name in a header."""

PIPELINE_COLUMNS = {"supervised_tokens", "padded_tokens", "micro_batches"}
"""By these, a curve is one of stage train."""
ON_DEVICE = (LIVE, PEAK, RESERVED)
RECORD = "record a snapshot of PyTorch's allocator over some steps; `lean-finetune snapshot --help` says how"

MOST_BYTES = 1 << 28
"""About a million steps."""

RecordedRow = dict[str, float | None]


def read_recorded(path: Path) -> list[RecordedRow]:
    """Read a CSV file with a header that has `step` and at least one of `COLUMNS`; ignore other columns.

    Raises:
        UserError: the file cannot be read; with its line.
    """
    rows: list[RecordedRow] = []
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


def _row(place: str, header: list[str], cells: list[str], step_before: float | None) -> RecordedRow:
    """Parse one line; empty cells become None."""
    if len(cells) != len(header):
        raise UserError(f"{place}: a line must have {len(header)} cells as the header; got {len(cells)}; correct it")
    row: RecordedRow = {}
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


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One cause of growth in a recorded curve."""

    growth: Growth
    text: str
    """The line for it."""
    usual_causes: tuple[str, ...]
    """In other programs than this pipeline."""

    def lines(self) -> Iterator[str]:
        """What to print of it."""
        yield self.text
        if self.usual_causes:
            yield "usual causes:"
            yield from (f"  {cause}" for cause in self.usual_causes)
            if self.growth.series in ON_DEVICE:
                yield f"the lines of code: {RECORD}"

    def as_json(self) -> dict[str, Any]:
        """For `explain --json`."""
        return {**asdict(self.growth), "text": self.text, "usual_causes": list(self.usual_causes)}


def explained(path: Path, left_gib: float | None) -> list[str]:
    """Return the lines about a recorded curve, for people."""
    return [line for finding in findings_of(path, left_gib) for line in finding.lines()]


def findings_of(path: Path, left_gib: float | None) -> list[Finding]:
    """Return the causes of growth in a recorded curve.

    With `left_gib`, the memory still free at its end, the line of a leak says when it is used up.
    """
    rows = read_recorded(path)
    free_bytes = None if left_gib is None else round(left_gib * GIB)
    with open(path, newline="", encoding="utf-8-sig") as file:
        ours = PIPELINE_COLUMNS <= {name.strip() for name in next(csv.reader(file))}
    return [
        Finding(
            growth=growth,
            text=growth_line(growth, rows, free_bytes, {} if ours else None),
            usual_causes=() if ours else usual_causes(growth),
        )
        for growth in classify(rows)
    ]
