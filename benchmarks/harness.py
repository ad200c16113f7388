"""What all benchmarks share: the command line, interleaved timing, the printed table and the results file.

A benchmark is `python -m benchmarks.<name> [--quick] [--out FILE]`. It prints a table and writes
benchmarks/results/<name>.json: name, date, commit, machine, versions, rows, bars.
"""

import importlib.metadata
import multiprocessing
import operator
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import psutil

from lean_finetune.core.atomic_files import write_json
from lean_finetune.core.errors import UserError

if TYPE_CHECKING:
    import click

RESULTS = Path("benchmarks/results")
LIBRARIES = ("bitsandbytes", "datasets", "dvc", "numpy", "peft", "pyarrow", "tokenizers", "torch", "transformers")
DIRTY = "-dirty"
"""Suffix of the commit where the checkout has uncommitted changes."""
COMPARE = {"<=": operator.le, ">=": operator.ge}

Name = TypeVar("Name")
Row = Mapping[str, Any]
"""One line of the table, by column. The names of columns in bytes end in `_bytes`, of columns in seconds in `_s`."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A limit for a measured value, which is a ratio where two things are compared."""

    name: str
    value: float
    rule: Literal["<=", ">="]
    limit: float

    @property
    def holds(self) -> bool:
        """Whether the value is on the right side of the limit."""
        return COMPARE[self.rule](self.value, self.limit)

    def as_json(self) -> dict[str, Any]:
        """The bar in the format of results files."""
        return {"name": self.name, "value": self.value, "bar": f"{self.rule} {self.limit:g}", "holds": self.holds}


def at_most(name: str, value: float, limit: float) -> Bar:
    """A bar with an upper limit."""
    return Bar(name=name, value=value, rule="<=", limit=limit)


def at_least(name: str, value: float, limit: float) -> Bar:
    """A bar with a lower limit."""
    return Bar(name=name, value=value, rule=">=", limit=limit)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Results of one run of a benchmark."""

    rows: Sequence[Row]
    bars: Sequence[Bar]


def benchmark(
    name: str, measure: Callable[..., Measured], options: "Sequence[click.Parameter]" = ()
) -> "click.Command":
    """Make the command of a benchmark; it exits with 1 if a bar fails.

    It refuses to write its published results file from a checkout with uncommitted changes.

    Args:
        name: name of its module and its results file.
        measure: does the work; its arguments are the value of --quick, and those of `options` by name.
        options: of this benchmark only.
    """
    import click  # Not at the top: benchmarks.gpu runs where click is missing.

    from lean_finetune.core.stage_command import StageCommand

    about = (sys.modules[measure.__module__].__doc__ or "").strip()

    @click.command(cls=StageCommand, help=about, params=list(options))
    @click.option("--quick", is_flag=True, help="A smaller run, with no results file unless --out names one.")
    @click.option("--out", type=Path, help=f"Results file.  [default: {RESULTS / name}.json]")
    def main(quick: bool, out: Path | None, **values: Any) -> None:
        published = not quick and out is None
        measured_at = publishable_commit(RESULTS / f"{name}.json") if published else commit()
        measured = measure(quick, **values)
        click.echo(format_table(measured.rows))
        if measured.bars:
            click.echo(format_table([bar.as_json() for bar in measured.bars]))
        target = RESULTS / f"{name}.json" if published else out
        if published and commit() != measured_at:
            target = Path(f"scratch/{name}.json")
            click.echo(f"note: the checkout changed while {name} ran, so its figures are not published", err=True)
        if target is not None:
            write_json(target, report(name, measured, measured_at))
            click.echo(f"written to {target}")
        if not all(bar.holds for bar in measured.bars):
            sys.exit(1)

    return main


def publishable_commit(path: Path) -> str | None:
    """The commit to which figures in a published results file will belong; None outside git.

    Raises UserError if the checkout has uncommitted changes, as nobody could reproduce the figures.
    """
    found = commit()
    if (found or "").endswith(DIRTY):
        raise UserError(
            f"{path}: published figures must belong to a commit, and this checkout has uncommitted changes; commit "
            "them, or name another file with --out"
        )
    return found


def report(name: str, measured: Measured, measured_at: str | None) -> dict[str, Any]:
    """The content of a results file; `measured_at` is the commit of the code that ran."""
    return {
        "name": name,
        "date": datetime.now(UTC).date().isoformat(),
        "commit": measured_at,
        "machine": machine(),
        "versions": versions(),
        "rows": list(measured.rows),
        "bars": [bar.as_json() for bar in measured.bars],
    }


def interleaved(cases: Mapping[Name, Callable[[], Any]], rounds: int, warm_up: bool = True) -> dict[Name, list[Any]]:
    """Call every case once a round, and return what each returned in each round.

    Each round starts with another case, so that neither their order nor a slow spell of the machine favours one.
    With `warm_up`, one more round runs first and does not count.
    """
    results: dict[Name, list[Any]] = {name: [] for name in cases}
    names = list(cases)
    for turn in range(-1 if warm_up else 0, rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            result = cases[name]()
            if turn >= 0:
                results[name].append(result)
    return results


def interleaved_seconds(cases: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Wall seconds of each case in each of `rounds` rounds, interleaved."""

    def timed(case: Callable[[], Any]) -> float:
        start = time.perf_counter()
        case()
        return time.perf_counter() - start

    return interleaved({name: partial(timed, case) for name, case in cases.items()}, rounds)


def median_ratio(values: Sequence[float], base: Sequence[float]) -> float:
    """Median over rounds of value / base. The two values of a round share the machine's noise."""
    return median(value / other for value, other in zip(values, base, strict=True))


def in_new_processes(
    work: Callable[[Any], Row], cases: Sequence[Any], start: Literal["spawn", "fork"] = "spawn"
) -> list[Row]:
    """Work on each case in a new process, so that no case uses what another one cached."""
    with multiprocessing.get_context(start).Pool(1, maxtasksperchild=1) as pool:
        rows = pool.map(work, cases, chunksize=1)
        pool.close()  # Leaving the block would terminate the process, which then prints a line.
        pool.join()
    return rows


def commit() -> str | None:
    """Short commit of the checkout, with `-dirty` where files other than results differ; None outside git."""
    head = _git("rev-parse", "--short=12", "HEAD")
    if head is None:
        return None
    return f"{head}{DIRTY}" if _git("status", "--porcelain", "--", ".", f":!{RESULTS}") else head


def _git(*arguments: str) -> str | None:
    """Output of a git command; None where git or the repository is missing."""
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def machine() -> dict[str, Any]:
    """Describe the machine by what explains its speed, without its name."""
    import torch

    gpus = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.machine()}",
        "gpus": [{"name": gpu.name, "memory_bytes": gpu.total_memory} for gpu in gpus],
    }


def _cpu_name() -> str:
    """The processor's model, or its architecture where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def versions() -> dict[str, str]:
    """Versions of Python and of the installed libraries that affect speed and memory."""
    found = {"python": platform.python_version()}
    for library in LIBRARIES:
        try:
            found[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def format_table(rows: Sequence[Row]) -> str:
    """Format rows as aligned text: bytes as MiB, floats with three decimals, numbers to the right."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    heads = [f"{key.removesuffix('_bytes')} MiB" if key.endswith("_bytes") else key for key in columns]
    table = [heads, *([_cell(key, row.get(key)) for key in columns] for row in rows)]
    widths = [max(map(len, cells)) for cells in zip(*table, strict=True)]
    numeric = [any(isinstance(row.get(key), int | float) for row in rows) for key in columns]
    lines = (
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(cells, widths, numeric, strict=True)
        ).rstrip()
        for cells in table
    )
    return "\n".join(lines) + "\n"


def _cell(key: str, value: Any) -> str:
    """Format one value."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if key.endswith("_bytes"):
        return f"{value / 2**20:,.0f}"
    return f"{value:,.3f}" if isinstance(value, float) else str(value)
