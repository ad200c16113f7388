"""Out of memory in real processes with a limit, and the lines that they print."""

import json
import os
import re
import shutil
import sys
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cuda_memory.units import MIB
from lean_finetune.core.atomic_files import write_sealed
from stages.bucket import main as bucket
from stages.pin import main as pin
from stages.tokenize import main as tokenize
from tests.conftest import ROOT
from tests.processes import run_bounded
from tests.workspace import invoke, lay_out, write_rows, write_verdict

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="limits of a process are Linux's"),
]

TRAIN = f"""
import os, resource, sys
sys.path.insert(0, {str(ROOT)!r})
import stages.train as stage
import psutil, lean_finetune.train.train_run
for case in sys.argv[1:]:
    workspace, budget = case.split("=")
    if not (child := os.fork()):
        os.chdir(workspace)
        for handle, name in ((1, "out.txt"), (2, "err.txt")):
            os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY), handle)
        if int(budget):
            limit = psutil.Process().memory_info().vms + int(budget)
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        stage.main([])
    with open(os.path.join(workspace, "status.txt"), "w") as file:
        file.write(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
"""
"""Trains in workspaces, each in a forked process with so many bytes of addresses besides the imports (0: no limit)."""
LARGE = 8192
"""bucket.max_tokens."""
TOO_LITTLE_MIB = 500
"""For a micro-batch of so many tokens."""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace in which the stages before train ran; estimate has a stand-in."""
    root = tmp_path_factory.mktemp("oom")
    lay_out(
        root,
        data__source="rows.jsonl",
        data__max_length=256,
        bucket__max_tokens=LARGE,
        train__tokens_per_step=2 * LARGE,
        train__epochs=1,
        train__heldout_every_steps=None,
        train__method="lora",
        train__lora__joined="none",  # Adapters that compute together need less than the limit.
        run__cpu_threads=1,
        run__data_workers=1,
        run__loader_threads=0,
    )
    with open(ROOT / "data/raw/sample.jsonl") as rows:  # All of the greatest length: each full micro-batch is needed.
        write_rows(root / "rows.jsonl", [{"text": row * 8} for row in islice(rows, 64)])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        for command, arguments in ((pin, ["data"]), (pin, ["model"]), (tokenize, []), (bucket, [])):
            done = invoke(command, *arguments)
            assert done.exit_code == 0, done.output
    write_verdict(root)
    breakdown = {"forward": {"weights": 20 * MIB, "logits": 300 * MIB}, "load": {"weights": 360 * MIB}}
    write_sealed(root / "data/estimate/breakdown.json", breakdown)
    changes = [("train.grad_ckpt=true", 50 * MIB), ("train.method=full", 10**12), ("bucket.max_tokens=4096", 40 * MIB)]
    single = [{"command": f"dvc exp run -S {flag}", "peak_bytes": size} for flag, size in changes]
    write_sealed(root / "data/estimate/advice.json", {"remedies": [], "single_changes": single})
    return root


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A training that ended."""

    workspace: Path

    @property
    def status(self) -> int:
        return int((self.workspace / "status.txt").read_text())

    @property
    def errors(self) -> str:
        return (self.workspace / "err.txt").read_text()


def save_large_model(directory: Path) -> Path:
    """A model whose 90 million weights take 360 MB in fp32, with the shipped tokenizer."""
    tiny = ROOT / "lean_finetune/tiny"
    config = LlamaConfig.from_pretrained(tiny, hidden_size=1024, intermediate_size=4096, num_hidden_layers=6)
    LlamaForCausalLM(config).to(dtype=torch.bfloat16).save_pretrained(directory)  # type: ignore[call-arg]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy2(tiny / name, directory / name)
    return directory


@pytest.fixture(scope="module")
def runs(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """Runs with too little memory for a micro-batch, or for the model; and one that is to record a GPU's."""
    place = tmp_path_factory.mktemp("runs")
    model = save_large_model(place / "model")
    large = shutil.copytree(prepared, place / "load", symlinks=True)
    params = large / "params.yaml"
    params.write_text(params.read_text().replace("name: tiny", f"name: {model}"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(large)
        assert invoke(pin, "model").exit_code == 0
    budgets = {"refused": TOO_LITTLE_MIB, "load": 300, "first_steps": 0}
    for name in ("refused", "first_steps"):
        shutil.copytree(prepared, place / name, symlinks=True)
    params = place / "first_steps/params.yaml"
    params.write_text(params.read_text().replace("_snapshot: on_oom", "_snapshot: first_steps"))
    # One arena: else malloc reserves 64 MiB of addresses for each thread. Freed blocks return their addresses.
    malloc = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "131072"}
    environment = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", **malloc}
    arguments = [f"{place / name}={budget * MIB}" for name, budget in budgets.items()]
    run_bounded([sys.executable, "-c", TRAIN, *arguments], cwd=place, env=environment, check=True)
    return {name: Ended(workspace=place / name) for name in budgets}


def test_large_batch_is_refused_with_measured_memory_and_changes_that_fit(runs: dict[str, Ended]):
    """A traceback of forty lines without a remedy."""
    refused = runs["refused"]
    first, *lines = refused.errors.strip().splitlines()
    assert refused.status == 3 and "Traceback" not in refused.errors
    where = (
        r"error: ulimit -v: this machine ran out of memory (allocating .+ )?in (forward|backward) of optimizer step 0, "
    )
    where += r"micro-batch 0 of \d+ \(32 x 256 tokens\): .+, or bucket\.max_tokens: lower it$"
    assert re.match(where, first), first
    assert any(line.startswith("  measured: ") and "weights 4.505 MiB" in line for line in lines)
    # PyTorch's allocation fails, or one of oneDNN's, whose error has no size.
    assert re.search(r"  allocator: (RuntimeError: .*DefaultCPUAllocator|MemoryError: std::bad_alloc)", refused.errors)
    assert [line for line in lines if "would fit: " in line] == [
        "  would fit: dvc exp run -S train.grad_ckpt=true (50 MiB)",
        "  would fit: dvc exp run -S bucket.max_tokens=4096 (40 MiB)",
    ]
    assert lines[-1] == "  no checkpoint was made: the same command starts at the first step"
    record = json.loads((refused.workspace / "scratch/train/oom.json").read_text())
    assert record["failure"]["padded_tokens"] == 32 * 256 and record["failure"]["process_status"]["VmRSS"]
    assert not (refused.workspace / "data/tuned").exists() and not (refused.workspace / "metrics/train.json").exists()


def test_model_that_does_not_fit_is_reported_as_such(runs: dict[str, Ended]):
    """A user who lowers the batch size, again and again, where the weights alone do not fit."""
    load = runs["load"]
    assert load.status == 3 and "Traceback" not in load.errors
    assert load.errors.startswith("error: ulimit -v: this machine ran out of memory"), load.errors
    assert (
        "or train.method: store the weights in fewer bits" in load.errors
        and "predicted: 0.3516 GiB of tensors" in load.errors
    )


def test_first_steps_without_a_gpu_are_refused_before_loading(runs: dict[str, Ended]):
    """A run of hours that was to be recorded, and no file at its end."""
    ended = runs["first_steps"]
    why = "first_steps records PyTorch's CUDA allocator; this run trains on the CPU; use never"
    assert (ended.status, ended.errors) == (1, f"error: run.memory_snapshot: {why}\n")
