"""Wall time and peak memory of every stage of the default run, and the time of a `dvc repro` with nothing to do.

The last commit is cloned into a temporary directory and run there from nothing, with this Python. Memory is the
resident memory of all processes of a stage. --quick runs few rows.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks.harness import Measured, Row, at_most, benchmark
from benchmarks.processes import WHOLE_RUN, clean_environment, error_line, watch
from lean_finetune.core.atomic_files import repo_root
from lean_finetune.core.errors import UserError
from tests.kit.write_params import write_params

REPRO = [sys.executable, "-m", "dvc", "repro"]
NO_OP_ROUNDS = 7
NO_OP_LIMIT_S = 2.0
RUN_LIMIT_S = 240.0
"""Limit of the default run on two cores."""
QUICK = {"data.max_rows": 400, "evaluate.generate_rows": 8, "evaluate.loss_rows": 16}


def measure(quick: bool) -> Measured:
    """Run the pipeline in a clone, then time the no-op."""
    with tempfile.TemporaryDirectory(prefix="lean-finetune-") as directory:
        clone = Path(directory) / "clone"
        environment = clean_environment()
        try:
            subprocess.run(
                ["git", "clone", "--quiet", str(repo_root().resolve()), str(clone)],
                check=True,
                capture_output=True,
                text=True,
            )
            if quick:
                write_params(clone, QUICK, clone / "params.yaml")
            usages, _ = watch(REPRO, clone, environment)
            no_op = [_no_op_seconds(clone, environment) for _ in range(NO_OP_ROUNDS)]
        except subprocess.CalledProcessError as error:
            line = error_line(f"{error.stdout or ''}{error.stderr or ''}")
            raise UserError(f"benchmarks.pipeline: `{' '.join(error.cmd[-2:])}` failed in a clone: {line}") from error
    rows: list[Row] = [
        {"what": what, "wall_s": round(usage.wall_s, 2), "peak_rss_bytes": usage.peak_rss_bytes}
        for what, usage in usages.items()
    ]
    rows.append({"what": "(no-op repro, median)", "wall_s": round(median(no_op), 3), "peak_rss_bytes": None})
    bars = [at_most("no-op dvc repro, seconds", round(median(no_op), 3), NO_OP_LIMIT_S)]
    if not quick:
        run_s = round(usages[WHOLE_RUN].wall_s, 1)
        bars.append(at_most("default run, seconds on 2 cores", run_s, RUN_LIMIT_S))
    return Measured(rows=rows, bars=bars)


def _no_op_seconds(clone: Path, environment: dict[str, str]) -> float:
    """Wall seconds of a `dvc repro` that has nothing to do."""
    start = time.perf_counter()
    done = subprocess.run(REPRO, cwd=clone, env=environment, check=True, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    ran = [line for line in done.stdout.splitlines() if line.startswith("Running stage")]
    if ran:
        raise UserError(f"benchmarks.pipeline: a second `dvc repro` must run nothing, got: {'; '.join(ran)}")
    return seconds


if __name__ == "__main__":
    benchmark("pipeline", measure)()
