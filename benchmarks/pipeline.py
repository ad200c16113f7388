"""Wall time and peak memory of every stage of the default run, and the time of a `dvc repro` with nothing to do.

The committed state is cloned into a temporary directory and run there from nothing, with this Python. Memory is the
resident memory of all of a stage's processes, seen from outside. --quick runs few rows.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from ruamel.yaml import YAML

from benchmarks.form import Bar, Measured, Row, benchmark
from benchmarks.watch import WHOLE, watch
from lean_finetune.core.atomic_files import repo_root
from lean_finetune.core.errors import UserError

REPRO = [sys.executable, "-m", "dvc", "repro"]
NO_OP_ROUNDS = 7
NO_OP_LIMIT_S = 2.0
RUN_LIMIT_S = 240.0
"""The default run on two cores, as the README promises."""
QUICK = {("data", "max_rows"): 400, ("evaluate", "generate_rows"): 8, ("evaluate", "loss_rows"): 16}


def measure(quick: bool) -> Measured:
    """Run the pipeline in a clone, then time the no-op.

    Raises:
        UserError: git, dvc or a stage failed; its last line is told.
    """
    with tempfile.TemporaryDirectory(prefix="lean-finetune-") as directory:
        clone = Path(directory) / "clone"
        environment = _environment()
        try:
            subprocess.run(
                ["git", "clone", "--quiet", str(repo_root().resolve()), str(clone)],
                check=True,
                capture_output=True,
                text=True,
            )
            if quick:
                _shrink(clone / "params.yaml")
            usages, _ = watch(REPRO, clone, environment)
            no_op = [_no_op_seconds(clone, environment) for _ in range(NO_OP_ROUNDS)]
        except subprocess.CalledProcessError as error:
            lines = f"{error.stdout or ''}{error.stderr or ''}".strip().splitlines()
            said = next((line for line in lines if line.startswith("error:")), lines[-1] if lines else "no output")
            raise UserError(f"benchmarks.pipeline: `{' '.join(error.cmd[-2:])}` failed in a clone: {said}") from error
    rows: list[Row] = [
        {"what": what, "wall_s": round(usage.wall_s, 2), "peak_rss_bytes": usage.peak_rss_bytes}
        for what, usage in usages.items()
    ]
    rows.append({"what": "(no-op repro, median)", "wall_s": round(median(no_op), 3), "peak_rss_bytes": None})
    bars = [Bar(name="no-op dvc repro, seconds", value=round(median(no_op), 3), rule="<=", limit=NO_OP_LIMIT_S)]
    if not quick:
        run_s = round(usages[WHOLE].wall_s, 1)
        bars.append(Bar(name="default run, seconds on 2 cores", value=run_s, rule="<=", limit=RUN_LIMIT_S))
    return Measured(rows=rows, bars=bars)


def _environment() -> dict[str, str]:
    """This process's environment with this Python first on the path and no trace of a DVC run around it."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("DVC_")}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', os.defpath)}"
    environment["DVC_NO_ANALYTICS"] = "1"
    return environment


def _shrink(params: Path) -> None:
    """Set the values of a quick run."""
    yaml = YAML()
    values = yaml.load(params.read_text(encoding="utf-8"))
    for (section, key), value in QUICK.items():
        values[section][key] = value
    with open(params, "w", encoding="utf-8") as file:
        yaml.dump(values, file)


def _no_op_seconds(clone: Path, environment: dict[str, str]) -> float:
    """Wall seconds of a `dvc repro` that must find nothing to do.

    Raises:
        UserError: a stage ran again.
    """
    start = time.perf_counter()
    done = subprocess.run(REPRO, cwd=clone, env=environment, check=True, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    ran = [line for line in done.stdout.splitlines() if line.startswith("Running stage")]
    if ran:
        raise UserError(f"benchmarks.pipeline: a second `dvc repro` must run nothing, got: {'; '.join(ran)}")
    return seconds


main = benchmark("pipeline", measure)

if __name__ == "__main__":
    main()
