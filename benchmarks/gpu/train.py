"""Speed of training on a CUDA machine: Llama-3.1-8B with random weights, ours and TRL's with the same settings.

`python -m benchmarks.gpu.train` writes its file after each configuration and goes on where it stopped, so that it can
run in short stretches. It needs no network, data, weights or DVC. TRL runs in a process of its own, with `--trl-python`
where its wheels are elsewhere; where it is not installed its columns say so. `--device cpu` shows on a small model that
it works. MFU is the arithmetic that tokens need (4 FLOP a frozen weight, 6 a trained one, and attention) as a share of
989 TFLOP/s.
"""

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch

from benchmarks.form import RESULTS, Bar, Row, commit, format_table, machine, versions
from benchmarks.gpu.run import Trained, forget, random_batch
from benchmarks.gpu.speed_cases import (
    CASES,
    PEAK_FLOPS,
    SMALL_CASES,
    SpeedCase,
    bars_of,
    flops_per_token,
    matmul_flops,
    seconds_of,
)
from lean_finetune.core.atomic_files import read_json, write_json
from lean_finetune.model.allocator_settings import use_segments

OUT = RESULTS / "gpu_train.json"
WARM_UP_STEPS, TIMED_STEPS = 3, 7
TRL_SECONDS = 300
"""The longest that TRL may take for one configuration, loading included."""


@click.command(help=__doc__)
@click.option("--device", "device_name", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--minutes", type=float, default=6.0, show_default=True, help="Begin no configuration after these.")
@click.option("--out", type=Path, default=OUT, show_default=True)
@click.option("--trl-python", type=str, default=sys.executable, help="Python that has TRL.  [default: this one]")
@click.option("--commit", "known_commit", help="What is measured, where the machine has no git.")
def main(device_name: str, minutes: float, out: Path, trl_python: str, known_commit: str | None) -> None:
    """Time what is not in the file yet."""
    start = time.monotonic()
    device = torch.device(device_name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise click.ClickException("--device: no CUDA device here; run it where there is one, or try --device cpu")
    use_segments(True, device)
    done = Results(out, known_commit or commit(), device)
    wanted = CASES if device.type == "cuda" else SMALL_CASES
    for case in wanted:
        if case.name in done.rows:
            continue
        if time.monotonic() - start > 60 * minutes:
            break
        row = ours(case, device)
        forget(device)
        done.add(case.name, {**row, **trl(case, device, trl_python)})
        click.echo(format_table([done.rows[case.name]]))
    if done.rows:
        click.echo(format_table([bar.as_json() for bar in done.bars()]))
    left = sum(case.name not in done.rows for case in wanted)
    click.echo(f"{out}: {len(done.rows)} configurations" + (f", {left} left: run it again" if left else ", all done"))


class Results:
    """The file: rows of one commit by name, and the rate of the card's products."""

    def __init__(self, path: Path, of_commit: str | None, device: torch.device):
        """Read what the same commit measured before; figures of another one are measured again."""
        self._path, self._commit = path, of_commit
        before = read_json(path) if path.exists() else {}
        same = before.get("commit") == of_commit and before.get("versions") == versions()
        self.rows: dict[str, Row] = {row["name"]: row for row in before["rows"]} if same else {}
        self._matmul: float = before["matmul_flops"] if same else matmul_flops(device)

    def bars(self) -> list[Bar]:
        """What is promised of the rows there are."""
        return [
            Bar(name=name, value=round(value, 4), rule=rule, limit=round(limit, 4))  # type: ignore[arg-type]
            for name, value, rule, limit in bars_of(self.rows, self._matmul)
        ]

    def add(self, name: str, row: Row) -> None:
        """Keep a row, in the file too."""
        self.rows[name] = row
        content: dict[str, Any] = {"name": "gpu_train", "commit": self._commit, "machine": machine()}
        content |= {"versions": versions(), "matmul_flops": self._matmul, "rows": list(self.rows.values())}
        content["bars"] = [bar.as_json() for bar in self.bars()]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._path, content)


def ours(case: SpeedCase, device: torch.device) -> Row:
    """Tokens a second of the training step, and its memory; or why there are none."""
    forget(device)
    row: dict[str, Any] = {"name": case.name}
    try:
        return {**row, **_timed(case, device)}
    except torch.OutOfMemoryError as error:
        return {**row, "out_of_memory": str(error).splitlines()[0]}


def _timed(case: SpeedCase, device: torch.device) -> Row:
    """Warm up, then time whole steps one by one; peaks are those of the steps, loading apart."""
    trained = Trained.of(case.config, case.setting, device)
    forget(device)
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    shape, vocabulary = case.shape, case.config.get_text_config().vocab_size
    batch = random_batch(shape, vocabulary, device)

    def step() -> None:
        # Reading the loss waits for the device, as the loop of stage train does.
        trained.step([batch], [shape], lambda name: contextlib.nullcontext()).loss.item()

    seconds = [seconds_of(step, device) for _ in range(WARM_UP_STEPS + TIMED_STEPS)][WARM_UP_STEPS:]
    tokens = case.rows * case.length
    flops = flops_per_token(trained.model, case) * tokens / median(seconds)
    return {
        "tokens_per_s": round(tokens / median(seconds), 1),
        "seconds": [round(each, 4) for each in seconds],
        "mfu_percent": round(100 * flops / PEAK_FLOPS, 2),
        "allocated_bytes": torch.cuda.max_memory_allocated(device) if cuda else None,
        "reserved_bytes": torch.cuda.max_memory_reserved(device) if cuda else None,
    }


def trl(case: SpeedCase, device: torch.device, python: str) -> Row:
    """The same by TRL's SFTTrainer, or why not."""
    command = [python, "-m", "benchmarks.gpu.trl_steps", case.name, device.type, str(WARM_UP_STEPS + TIMED_STEPS)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TRL_SECONDS)
    except subprocess.TimeoutExpired:
        return {"trl": f"not done after {TRL_SECONDS} s"}
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no output"]
        return {"trl": lines[-1]}
    told = json.loads(done.stdout.strip().rpartition("\n")[2])
    seconds = told["seconds"][WARM_UP_STEPS:]
    return {
        "trl": told["trl"],
        "trl_tokens_per_s": round(case.rows * case.length / median(seconds), 1),
        "trl_allocated_bytes": told["allocated_bytes"],
        "trl_reserved_bytes": told["reserved_bytes"],
    }


if __name__ == "__main__":
    main()
