"""CPU seconds of `lean-finetune fit` as a user runs it, from the start of the process, as multiples of `import torch`.

CPU seconds depend on the machine and on what else it runs. Those of `import torch`, measured before and after each
case, depend on both in the same way. Each process has one thread, and reads neither weights nor a GPU.
"""

import os
import statistics
import subprocess
import sys
from dataclasses import dataclass

from benchmarks.harness import Measured, Row, at_most, benchmark

TORCH_S = 3.0
"""CPU seconds of `import torch` on the two-core machine for which the limits are stated."""
MOST_RSS_GIB = 1.5
LLAMA_8B, LLAMA_70B = (f"llama-3.1-{size}" for size in ("8b", "70b"))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A call of `fit`, and the CPU seconds that it may take where `import torch` takes `TORCH_S`."""

    name: str
    options: tuple[str, ...]
    limit_s: float

    @property
    def command(self) -> list[str]:
        """The process."""
        return [sys.executable, "-m", "lean_finetune.cli", "fit", "--gpu", "RTX-4090", *self.options]


CASES: tuple[Case, ...] = (
    Case(name="8B QLoRA, verdict", options=("--model", LLAMA_8B, "--verdict"), limit_s=6),
    Case(name="8B QLoRA, complete answer", options=("--model", LLAMA_8B), limit_s=15),
    Case(name="8B full, too large, with advice", options=("--model", LLAMA_8B, "--method", "full"), limit_s=25),
    Case(name="70B QLoRA, too large, with advice", options=("--model", LLAMA_70B), limit_s=30),
    Case(
        name="8B QLoRA, a row of 131,072 tokens, verdict",
        options=("--model", LLAMA_8B, "--length", "131072", "--verdict"),
        limit_s=10,
    ),
)
MODELS = ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-14b", "qwen2.5-32b", "qwen2.5-vl-7b", LLAMA_70B)
"""Beside the 8B: a model whose layers do not extrapolate takes several times as long."""
CASES += tuple(
    Case(name=f"{model} QLoRA on an H100, complete answer", options=("--model", model, "--gpu", "H100"), limit_s=25)
    for model in MODELS
)
IMPORT_TORCH = [sys.executable, "-c", "import torch"]


def run(command: list[str]) -> tuple[float, int, int, str]:
    """CPU seconds of a process, its largest resident bytes, its exit code and its first line."""
    alone = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **alone})
    assert process.stdout is not None
    text = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    first = text.partition("\n")[0]
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, process.returncode, first


def answer(case: Case) -> Row:
    """Run a case between two imports of PyTorch."""
    before = run(IMPORT_TORCH)[0]
    cpu_s, rss_bytes, code, verdict = run(case.command)
    torch_s = statistics.mean([before, run(IMPORT_TORCH)[0]])
    if code not in (0, 3):
        raise SystemExit(f"{case.name}: exit code {code}")
    return {
        "case": case.name,
        "verdict": " ".join(verdict.split()),
        "cpu_s": cpu_s,
        "import_torch_cpu_s": torch_s,
        "times_import_torch": cpu_s / torch_s,
        "rss_bytes": rss_bytes,
    }


def measure(quick: bool) -> Measured:
    """Run every case once; with `quick` the first one only, without its time."""
    chosen = CASES[: 1 if quick else None]
    run(chosen[0].command)  # Files are read from the disk once, and compiled.
    rows, bars = [answer(case) for case in chosen], []
    for case, row in zip(chosen, rows, strict=True):
        if not quick:
            limit = round(case.limit_s / TORCH_S, 1)
            bars.append(at_most(f"{case.name}, times import torch", row["times_import_torch"], limit))
        bars.append(at_most(f"{case.name}, RSS GiB", row["rss_bytes"] / 2**30, MOST_RSS_GIB))
    return Measured(rows=rows, bars=bars)


if __name__ == "__main__":
    benchmark("estimate_speed", measure)()
