"""CPU seconds of `lean-finetune fit` and `plan` as a user runs them, from the start of the process to its end.

CPU seconds depend on the machine, on what else it runs, and on the releases of PyTorch and transformers. So does the
reference: a process that imports what any trainer imports, PyTorch, transformers' Llama and peft. It is measured before
and after each case, and each limit is a multiple of it. The import of PyTorch alone was the reference once: it became
twice as fast with a release, while transformers' became slower.

The limits are what a user waits for. A verdict takes no longer than a trainer takes to start. A complete answer takes
two and a half times as long, whichever model of the tables it is for; a search for what would fit takes four times as
long. `plan` may take a minute where the imports take 6 s. Each process has one thread, and reads neither weights nor a
GPU.
"""

import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.harness import Measured, Row, at_most, benchmark
from benchmarks.models.published import published_models
from data.synth import images
from lean_finetune.core.atomic_files import write_json
from tests.small_vision import vision_model

VERDICT, COMPLETE, ADVICE, PLAN = 1.0, 2.5, 4.0, 10.0
"""Limits by what is asked for, as multiples of a trainer's imports."""
MOST_RSS_GIB = 1.5
LLAMA_8B, LLAMA_70B = (f"llama-3.1-{size}" for size in ("8b", "70b"))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A command, and the CPU seconds that it may take."""

    name: str
    options: tuple[str, ...]
    limit: float
    """Multiple of a trainer's imports."""

    @property
    def command(self) -> list[str]:
        """The process."""
        return [sys.executable, "-m", "lean_finetune.cli", *self.options]


def fit(name: str, limit: float, model: str, *options: str, gpu: str = "RTX-4090") -> Case:
    """An answer of `fit`, of QLoRA if not said otherwise."""
    return Case(name=name, options=("fit", "--gpu", gpu, "--model", model, *options), limit=limit)


LONG_ROW = ("--length", "131072", "--verdict")
MODELS = ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-14b", "qwen2.5-32b", "qwen2.5-vl-7b", LLAMA_70B)
"""Beside the 8B: a model whose layers do not extrapolate takes several times as long."""
CASES: tuple[Case, ...] = (
    fit("8B QLoRA, verdict", VERDICT, LLAMA_8B, "--verdict"),
    fit("8B QLoRA, complete answer", COMPLETE, LLAMA_8B),
    fit("8B full, too large, with advice", ADVICE, LLAMA_8B, "--method", "full"),
    fit("70B QLoRA, too large, with advice", ADVICE, LLAMA_70B),
    fit("8B QLoRA, a row of 131,072 tokens, verdict", VERDICT, LLAMA_8B, *LONG_ROW),
    *(fit(f"{model} QLoRA on an H100, complete answer", COMPLETE, model, gpu="H100") for model in MODELS),
    Case(
        name="plan of a 70B on 8 H100",
        options=("plan", "--gpu", "H100", "--gpus", "8", "--model", LLAMA_70B, "--length", "2048", "--dry-run"),
        limit=PLAN,
    ),
)
OF_OTHER_FAMILIES = ("Qwen3-30B-A3B", "gpt-oss-20b", "Gemma 3 27B (text part)", "DeepSeek-V2-Lite", "Nemotron-H 8B")
"""Models of docs/models.md with experts, windows, latent attention and state spaces."""
ROWS_OF_IMAGES = 100


def fits_of_other_families(directory: Path) -> list[Case]:
    """`fit` of published models whose configs are written here."""
    cases = []
    for number, name in enumerate(OF_OTHER_FAMILIES):
        config = directory / str(number) / "config.json"
        config.parent.mkdir()
        write_json(config, published_models()[name])
        cases.append(fit(f"{name} QLoRA on an H100, complete answer", COMPLETE, str(config.parent), gpu="H100"))
    return cases


def plan_of_images(directory: Path) -> Case:
    """`plan` for a tiny model and rows with images, of which a micro-batch has hundreds; both are made here."""
    vision_model(directory / "model")
    images.write(directory, train=ROWS_OF_IMAGES, heldout=1, seed=0)
    files = ("--model", str(directory / "model"), "--data", str(directory / "train.jsonl"))
    large = ("-S", "train.tokens_per_step=65536")
    name = "plan of a tiny model for images"
    return Case(name=name, options=("plan", "--gpu", "RTX-4090", *files, *large, "--dry-run"), limit=PLAN)


TRAINER_IMPORTS = "import torch, transformers.models.llama.modeling_llama, peft"
IMPORT_TRAINER = [sys.executable, "-c", TRAINER_IMPORTS]


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
    """Run a case between two processes with a trainer's imports."""
    before = run(IMPORT_TRAINER)[0]
    cpu_s, rss_bytes, code, verdict = run(case.command)
    imports_s = statistics.mean([before, run(IMPORT_TRAINER)[0]])
    if code not in (0, 3):
        raise SystemExit(f"{case.name}: exit code {code}")
    return {
        "case": case.name,
        "verdict": " ".join(verdict.split()),
        "cpu_s": cpu_s,
        "imports_cpu_s": imports_s,
        "times_imports": cpu_s / imports_s,
        "limit": case.limit,
        "rss_bytes": rss_bytes,
    }


def measure(quick: bool) -> Measured:
    """Run every case once; with `quick` the first one only, without its time."""
    run(CASES[0].command)  # Files are read from the disk once, and compiled.
    with TemporaryDirectory() as directory:
        others = [] if quick else [*fits_of_other_families(Path(directory)), plan_of_images(Path(directory))]
        chosen = [*(CASES[:1] if quick else CASES), *others]
        rows, bars = [answer(case) for case in chosen], []
    for case, row in zip(chosen, rows, strict=True):
        if not quick:
            bars.append(at_most(f"{case.name}, times a trainer's imports", row["times_imports"], case.limit))
        bars.append(at_most(f"{case.name}, RSS GiB", row["rss_bytes"] / 2**30, MOST_RSS_GIB))
    return Measured(rows=rows, bars=bars)


if __name__ == "__main__":
    benchmark("estimate_speed", measure)()
