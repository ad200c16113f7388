"""Training steps shared by two and four processes, in every mode, beside plain DDP and Hugging Face's Trainer.

CPU processes of one thread each, linked by gloo, run full fp32 steps of a small random Llama (4 rows of 128 tokens for
each process). The ways take turns, so that they share the machine's noise. Sent bytes are counted by the loopback
device. The bytes that all processes read while the model loads are compared with the size of its file. Four processes
are for the modes that two cannot have; on fewer cores than that, their times say less.
"""

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import LlamaForCausalLM

from benchmarks.harness import Measured, Row, at_most, benchmark, median_ratio
from benchmarks.processes import ROOT, clean_environment, run
from benchmarks.rivals.shared_steps import HF, OURS, PLAIN, STEPS, WARM_STEPS
from benchmarks.specs import llama

NAMES = {PLAIN: "plain DDP", HF: "HF Trainer (DDP)"}
ROUNDS, QUICK_ROUNDS = 9, 1
STEP_LIMIT, READ_LIMIT = 1.0, 1.1
HIDDEN, QUICK_HIDDEN = 256, 64
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def save_model(directory: Path, hidden: int) -> int:
    """Save a random Llama of four layers; return the bytes of its weights' file."""
    tokens = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}
    config = llama(hidden, 3 * hidden, layers=4, heads=4, kv_heads=4, vocabulary=4096, tied=True, **tokens)
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(directory)
    return (directory / "model.safetensors").stat().st_size


def measure(quick: bool) -> Measured:
    """Load in every mode, then run steps in turns, for each number of processes."""
    environment = clean_environment(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", PYTHONPATH=str(ROOT))
    rows: list[Row] = []
    of_trainer, read = [], []
    with tempfile.TemporaryDirectory() as directory:
        small, model = Path(directory) / "small", Path(directory) / "model"
        save_model(small, QUICK_HIDDEN)
        file_bytes = save_model(model, QUICK_HIDDEN if quick else HIDDEN)
        for processes in OURS:
            module = (str(processes), "-m", "benchmarks.rivals.shared_steps")
            arguments = (small, model, Path(directory) / "out", str(QUICK_ROUNDS if quick else ROUNDS))
            figures = run([*TORCHRUN, *module, *arguments], environment=environment).figures
            seconds = _seconds(figures["steps"])
            of_trainer.append(median_ratio(seconds["ddp"], seconds[HF]))
            read += [load["read_bytes"] / file_bytes for load in figures["loads"].values()]
            rows += _rows(figures, processes, file_bytes)
    bars = [
        at_most("DDP step / HF Trainer's, two processes", of_trainer[0], STEP_LIMIT),
        at_most("bytes read to load / bytes of the file", max(read), READ_LIMIT),
    ]
    return Measured(rows=rows, bars=[] if quick else bars)  # A small file and few steps measure neither.


def _seconds(steps: Mapping[str, Any]) -> dict[str, list[float]]:
    """The median step of each round by way."""
    return {way: [median(one["seconds"][WARM_STEPS:]) for one in found] for way, found in steps.items()}


def _rows(figures: Mapping[str, Any], processes: int, file_bytes: int) -> list[Row]:
    """A row for the steps of each way, and one for its load: bytes read, and those that processes allocate."""
    seconds = _seconds(figures["steps"])
    steps: list[Row] = [
        {
            "what": f"step: {NAMES.get(way, way)}",
            "processes": processes,
            "step_s": median(found),
            "of plain DDP": median_ratio(found, seconds[PLAIN]),
            "sent_bytes": median(one["sent_bytes"] for one in figures["steps"][way]) / (WARM_STEPS + STEPS),
        }
        for way, found in seconds.items()
    ]
    return steps + [
        {
            "what": f"load: {mode}",
            "processes": processes,
            "read of the file": load["read_bytes"] / file_bytes,
            "first_own_bytes": load["own_bytes"][0],
            "others_own_bytes": max(load["own_bytes"][1:]),
        }
        for mode, load in figures["loads"].items()
    ]


if __name__ == "__main__":
    benchmark("distributed", measure)()
