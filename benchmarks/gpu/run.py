"""The benchmarks of a CUDA machine: peak memory against its prediction, and speed beside TRL.

`python -m benchmarks.gpu.run [memory] [speed]` writes its results after each configuration and continues where it
stopped, so that it can run in short stretches. It needs no network, data, weights or DVC: only PyTorch, transformers,
peft, bitsandbytes and pydantic. TRL runs in its own process, with `--trl-python` where it is installed elsewhere; where
it is missing, its columns say so. `--device cpu` shows on small models that the benchmark works.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click
import torch

from benchmarks.gpu import memory, speed
from benchmarks.gpu.cases import SMALL_SPEED_CASES, SPEED_CASES, GpuCase, SpeedCase, cases, small_cases
from benchmarks.harness import RESULTS, Row, commit, format_table, machine, versions
from lean_finetune.core.atomic_files import read_json, write_json


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A benchmark with one row for each configuration."""

    results_file: str
    cases: Sequence[GpuCase | SpeedCase]
    measure: Callable[..., Row]
    summary: Callable[[Mapping[str, Row]], list[Row]]


def rows_of(path: Path, of_commit: str | None) -> dict[str, Row]:
    """Rows that a results file has of this commit and these library versions, by name."""
    before = read_json(path) if path.exists() else {}
    same = before.get("commit") == of_commit and before.get("versions") == versions()
    return {row["name"]: row for row in before["rows"]} if same else {}


def suites(device: torch.device, trl_python: str) -> dict[str, Suite]:
    """The suites by name; on a CPU with small models."""
    cuda = device.type == "cuda"
    return {
        "memory": Suite(
            results_file="gpu_memory.json",
            cases=list(cases() if cuda else small_cases()),
            measure=partial(memory.compare, device=device),
            summary=memory.summary,
        ),
        "speed": Suite(
            results_file="gpu_train.json",
            cases=SPEED_CASES if cuda else SMALL_SPEED_CASES,
            measure=partial(speed.compare, device=device, trl_python=trl_python),
            summary=speed.summary,
        ),
    }


def run_suite(suite: Suite, path: Path, of_commit: str | None, ends: float) -> bool:
    """Measure the configurations that the results file lacks, starting none after `ends` (time.monotonic).

    Returns:
        Whether all bars pass.
    """
    rows = rows_of(path, of_commit)
    for case in suite.cases:
        if case.name in rows:
            continue
        if time.monotonic() > ends:
            break
        rows[case.name] = suite.measure(case)
        content = {"name": path.stem, "commit": of_commit, "machine": machine(), "versions": versions()}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {**content, "rows": list(rows.values()), "summary": suite.summary(rows)})
        click.echo(format_table([{k: v for k, v in rows[case.name].items() if not isinstance(v, dict)}]))
    bars = suite.summary(rows)
    if bars:
        click.echo(format_table(bars))
    left = sum(case.name not in rows for case in suite.cases)
    click.echo(f"{path}: {len(rows)} configurations" + (f", {left} left: run again" if left else ", all done"))
    return all(bar["holds"] for bar in bars)


@click.command(help=__doc__)
@click.argument("names", nargs=-1, type=click.Choice(["memory", "speed"]))
@click.option("--device", "device_name", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--minutes", type=float, default=8.0, show_default=True, help="Start no configuration after these.")
@click.option("--out", type=Path, default=RESULTS, show_default=True, help="Directory of the results files.")
@click.option("--trl-python", type=str, default=sys.executable, help="Python that has TRL.  [default: this one]")
@click.option("--commit", "known_commit", help="Commit of the code, for a machine without git.")
def main(
    names: Sequence[str], device_name: str, minutes: float, out: Path, trl_python: str, known_commit: str | None
) -> None:
    """Run both suites, or those named."""
    ends = time.monotonic() + 60 * minutes
    device = torch.device(device_name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise click.ClickException("--device: no CUDA device here; run on a machine with one, or try --device cpu")
    known = suites(device, trl_python)
    of_commit = known_commit or commit()
    chosen = [known[name] for name in names or known]
    if not all([run_suite(suite, out / suite.results_file, of_commit, ends) for suite in chosen]):
        sys.exit(1)


if __name__ == "__main__":
    main()
