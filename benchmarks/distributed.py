"""Training steps shared by two processes, in every sharding mode, beside plain DDP and Hugging Face's Trainer.

Two CPU processes of one thread each, linked by gloo, run full fp32 steps of a small random Llama (8 rows of 128 tokens
together). The ways take turns, so that they share the machine's noise. Sent bytes are counted by the loopback device.
The bytes that both processes read while the model loads are compared with the size of its file.
"""

import sys
import tempfile
from pathlib import Path
from statistics import median

import torch
from transformers import LlamaForCausalLM

from benchmarks.harness import Measured, Row, at_most, benchmark, median_ratio
from benchmarks.processes import ROOT, clean_environment, run
from benchmarks.rivals.shared_steps import HF, PLAIN, STEPS, WARM_STEPS
from benchmarks.specs import llama

NAMES = {PLAIN: "plain DDP", HF: "HF Trainer (DDP)"}
ROUNDS, QUICK_ROUNDS = 9, 1
STEP_LIMIT, READ_LIMIT = 1.0, 1.1
HIDDEN, QUICK_HIDDEN = 256, 64
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def save_model(directory: Path, hidden: int) -> int:
    """Save a random Llama of four layers; return the bytes of its weights' file."""
    tokens = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}
    config = llama(hidden, 3 * hidden, layers=4, heads=4, kv_heads=4, vocabulary=4096, tied=True, **tokens)
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(directory)
    return (directory / "model.safetensors").stat().st_size


def measure(quick: bool) -> Measured:
    """Load in every mode, then run steps in turns."""
    environment = clean_environment(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", PYTHONPATH=str(ROOT))
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        file_bytes = save_model(model, QUICK_HIDDEN if quick else HIDDEN)
        arguments = (model, Path(directory) / "out", str(QUICK_ROUNDS if quick else ROUNDS))
        done = run([*TORCHRUN, "-m", "benchmarks.rivals.shared_steps", *arguments], environment=environment)
    loads, answers = done.figures["loads"], done.figures["steps"]
    seconds = {way: [median(one["seconds"][WARM_STEPS:]) for one in found] for way, found in answers.items()}
    rows: list[Row] = [
        {
            "what": f"step: {NAMES.get(way, way)}",
            "step_s": median(found),
            "of plain DDP": median_ratio(found, seconds[PLAIN]),
            "sent_bytes": median(one["sent_bytes"] for one in answers[way]) / (WARM_STEPS + STEPS),
        }
        for way, found in seconds.items()
    ]
    for mode, load in loads.items():
        rows.append(
            {
                "what": f"load: {mode}",
                "read of the file": load["read_bytes"] / file_bytes,
                "first_own_bytes": load["own_bytes"][0],
                "second_own_bytes": load["own_bytes"][1],
            }
        )
    bars = [
        at_most("DDP step / HF Trainer's", median_ratio(seconds["ddp"], seconds[HF]), STEP_LIMIT),
        at_most(
            "bytes read to load / bytes of the file",
            max(load["read_bytes"] for load in loads.values()) / file_bytes,
            READ_LIMIT,
        ),
    ]
    return Measured(rows=rows, bars=[] if quick else bars)  # A small file and few steps measure neither.


if __name__ == "__main__":
    benchmark("distributed", measure)()
