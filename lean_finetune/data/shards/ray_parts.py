"""Tokenize as the tasks of a Ray cluster: one part each, then merged here. Needs the extra `ray`.

Every node needs this checkout at the same path, on a shared file system or its own copy, and `--out` must be shared.
"""

import subprocess
import sys
from pathlib import Path

import click

from lean_finetune.core.errors import StageCommand, UserError


@click.command(cls=StageCommand)
@click.option("--parts", type=click.IntRange(min=1), required=True, help="Tasks to share the work out to.")
@click.option("--cpus", type=click.IntRange(min=1), default=1, show_default=True, help="Cores of each task.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Shared directory for the parts.")
@click.option("--address", help="Address of a cluster; without it, Ray starts on this machine.")
def main(parts: int, cpus: int, out: Path, address: str | None) -> None:
    """Make all parts as Ray tasks, then merge them into data/tokens.

    Set run.data_workers to the same number as --cpus.
    """
    try:
        import ray
    except ImportError:
        raise UserError("ray is not installed; pip install 'lean-finetune[ray]'") from None
    checkout, shared = Path.cwd(), out.resolve()

    @ray.remote(num_cpus=cpus)
    def make(part: int) -> str:
        arguments = ["--part", f"{part}/{parts}", "--out", str(shared)]
        done = subprocess.run(
            [sys.executable, "-m", "stages.tokenize", *arguments], cwd=checkout, stderr=subprocess.PIPE, text=True
        )
        return "" if done.returncode == 0 else done.stderr.strip().rpartition("\n")[2] or f"status {done.returncode}"

    ray.init(address=address, log_to_driver=False)
    try:
        faults = ray.get([make.remote(part) for part in range(parts)])
    finally:
        ray.shutdown()
    for part, fault in enumerate(faults):
        if fault:
            raise UserError(f"--part {part}/{parts}: {fault.removeprefix('error: ')}")
    merged = subprocess.run([sys.executable, "-m", "stages.tokenize", "--merge", str(shared)])
    sys.exit(merged.returncode)


if __name__ == "__main__":
    main()
