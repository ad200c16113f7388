"""Training steps shared by two processes, in every sharding mode, beside plain DDP and Hugging Face's Trainer.

Two CPU processes of one thread each, linked by gloo, run full fp32 steps of a small random Llama (4 rows of 128 tokens
each). The ways take turns, so that they share the machine's noise. Sent bytes are counted by the loopback device. The
bytes that both processes read while the model loads are compared with the size of its file.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import LlamaForCausalLM

from benchmarks.harness import Measured, Row, at_most, benchmark, interleaved, median_ratio
from benchmarks.specs import llama

PROCESSES = 2
MODES = ("ddp", "zero1", "zero2", "zero3")
PLAIN, HF = "ddp_plain", "hf"
NAMES = {PLAIN: "plain DDP", HF: "HF Trainer (DDP)"}
ROUNDS, QUICK_ROUNDS = 9, 1
STEPS = 6
WARM_STEPS = 1
"""First steps of each call, which do not count: the Trainer builds its DDP in each call."""
STEP_LIMIT, READ_LIMIT = 1.0, 1.1
HIDDEN, QUICK_HIDDEN = 256, 64


def save_model(directory: Path, hidden: int) -> int:
    """Save a random Llama of four layers; return the bytes of its weights' file."""
    tokens = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}
    config = llama(hidden, 3 * hidden, layers=4, heads=4, kv_heads=4, vocabulary=4096, tied=True, **tokens)
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(directory)
    return (directory / "model.safetensors").stat().st_size


class Pair:
    """The two processes that share steps."""

    def __init__(self, processes: list[subprocess.Popen[str]]):
        """Use these processes."""
        self._processes = processes

    def call(self, **request: Any) -> dict[str, Any]:
        """Send a request to both processes and return the answer of the first.

        Raises:
            RuntimeError: a process ended.
        """
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        answers = []
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"a process ended during {request}")
            answers.append(json.loads(line))
        return answers[0]


@contextmanager
def started(model: Path, out: Path) -> Iterator[Pair]:
    """Start two processes, which end with the block."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment |= {"WORLD_SIZE": str(PROCESSES), "LOCAL_WORLD_SIZE": str(PROCESSES), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "benchmarks.rivals.shared_steps", str(model), str(out)]
    processes = [
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(PROCESSES)
    ]
    try:
        yield Pair(processes)
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def measure(quick: bool) -> Measured:
    """Load in every mode, then run steps in turns."""
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        file_bytes = save_model(model, QUICK_HIDDEN if quick else HIDDEN)
        with started(model, Path(directory) / "out") as pair:
            loads = {mode: pair.call(way=mode, steps=0, load=True) for mode in MODES}
            cases = {way: partial(pair.call, way=way, steps=WARM_STEPS + STEPS) for way in (*MODES, PLAIN, HF)}
            answers = interleaved(cases, QUICK_ROUNDS if quick else ROUNDS)
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
