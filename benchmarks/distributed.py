"""Training steps shared by two and four processes, in every mode, beside plain DDP and Hugging Face's Trainer.

CPU processes of one thread each, linked by gloo, run fp32 steps of a small random Llama (4 rows of 128 tokens for each
process): full, and on two processes also LoRA and QLoRA. The ways take turns, so that they share the machine's noise.
Sent bytes are counted by the loopback device, so nothing else may use it. The bytes that all processes read while the
model loads are compared with the size of its file. On fewer cores than processes, times of four processes say less.
"""

import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import LlamaForCausalLM

from benchmarks.harness import Measured, Row, at_most, benchmark, median_ratio
from benchmarks.processes import ROOT, clean_environment, run
from benchmarks.rivals.shared_steps import HF, LAYERS, OURS, PLAIN, STEPS, WARM_STEPS
from tests.kit.specs import llama

DDP = ("full", "ddp")
ROUNDS, QUICK_ROUNDS = 3, 1
STEP_LIMIT, READ_LIMIT = 1.0, 1.1
HIDDEN, QUICK_HIDDEN = 256, 128
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def save_model(directory: Path, hidden: int) -> int:
    """Save a random Llama of four layers; return the bytes of its weights' file."""
    tokens = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}
    config = llama(hidden, 3 * hidden, layers=LAYERS, heads=4, kv_heads=4, vocabulary=4096, tied=True, **tokens)
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
            of_trainer.append(median_ratio(seconds[DDP], seconds[HF]))
            read += [load["read_bytes"] / file_bytes for _, load in figures["loads"]]
            rows += _rows(figures, processes, file_bytes)
    bars = [
        at_most("DDP step / HF Trainer's, two processes", of_trainer[0], STEP_LIMIT),
        at_most("bytes read to load / bytes of the file", max(read), READ_LIMIT),
    ]
    return Measured(rows=rows, bars=[] if quick else bars)  # A small file and few steps measure neither.


def _seconds(steps: Iterable[tuple[list[str], Any]]) -> dict[tuple[str, str], list[float]]:
    """The median step of each round by method and way."""
    return {(method, way): [median(one["seconds"][WARM_STEPS:]) for one in found] for (method, way), found in steps}


def _rows(figures: Mapping[str, Any], processes: int, file_bytes: int) -> list[Row]:
    """A row for the steps of each way, and one for its load: bytes read, and those that processes allocate."""
    seconds = _seconds(figures["steps"])
    steps: list[Row] = [
        {
            "what": f"step: {way}",
            "processes": processes,
            "method": method,
            "step_s": median(seconds[method, way]),
            "of its ddp": median_ratio(seconds[method, way], seconds[method, "ddp"]),
            "of plain DDP, full": median_ratio(seconds[method, way], seconds[PLAIN]),
            "sent_bytes": median(one["sent_bytes"] for one in found) / (WARM_STEPS + STEPS),
        }
        for (method, way), found in figures["steps"]
    ]
    return steps + [
        {
            "what": f"load: {way}",
            "processes": processes,
            "method": method,
            "read of the file": load["read_bytes"] / file_bytes,
            "first_own_bytes": load["own_bytes"][0],
            "others_own_bytes": max(load["own_bytes"][1:]),
        }
        for (method, way), load in figures["loads"]
    ]


if __name__ == "__main__":
    benchmark("distributed", measure)()
