"""How fast the estimate answers: verdict of 8B and 70B, and the search for advice, on one core without weights.

Each case runs in a process of its own with one thread. Seconds are CPU seconds after imports: those of wall on a core
that has nothing else to do.
"""

import json
import subprocess
import sys
from typing import Any

from benchmarks.harness import Bar, Measured, Row, benchmark

CODE = """
import json, resource, sys, time
import torch
torch.set_num_threads(1)
from transformers import LlamaConfig
import numpy as np
from lean_finetune.plan.batch_plan import MicroBatch, Plan
from lean_finetune.memory.advice.search import advise
from lean_finetune.memory.devices import resolve_gpu
from lean_finetune.memory.trace.cuda_kernels import target_of
from lean_finetune.memory.allocator.plan_memory import replay_plan
from lean_finetune.memory.predict.peak import Setting, predict
from lean_finetune.memory.predict.peak_breakdown import predict_explained
from lean_finetune.memory.advice.verdict import usable_bytes
from lean_finetune.memory.advice.workload import Costs, Workload, full_batch, largest_steps
from lean_finetune.model.model_spec import ModelSpec

STEPS, MICRO_BATCHES = 10000, 8
case = json.loads(sys.argv[1])
config = LlamaConfig(**case["config"], vocab_size=128256, max_position_embeddings=131072, tie_word_embeddings=False)
spec = ModelSpec(method=case["method"], precision="bf16", grad_ckpt=case["grad_ckpt"], lora_rank=16, lora_alpha=32,
                 lora_dropout=0.0, lora_targets=("all-linear",), seed=1)
setting = Setting(model=spec, optimizer="adamw", loss_chunk=case["loss_chunk"], max_grad_norm=1.0)
device, _ = resolve_gpu(case["gpu"])
target = target_of(device)
steps = largest_steps(full_batch("bucketed", 2048, max_tokens=8192, fixed_rows=1), several=True)
start, cpu = time.perf_counter(), time.process_time()
remedies = replayed = None
if case["search"]:
    found = predict(config, setting, steps, target)
else:  # As the stage: the peak taken apart, and the whole plan replayed.
    found, _ = predict_explained(config, setting, steps, target)
    lengths = [8, 2048] + [8 * (29 + 37 * number % 227) for number in range(STEPS * MICRO_BATCHES - 2)]
    rows = [1] + [8192 // length for length in lengths[1:]]
    plan = Plan.of([MicroBatch(epoch=0, step=place // MICRO_BATCHES, rows=np.arange(count), length=length,
                               supervised=count * (length - 1))
                    for place, (count, length) in enumerate(zip(rows, lengths))])
    memory, replayed = replay_plan(plan, np.full(8192, 8), config, setting, target, found,
                                   expandable=True, device=device)
    assert memory is not None, replayed
if case["search"]:
    run = Workload(config=config, setting=setting, steps=found.steps_of_peak, mode="bucketed", max_tokens=8192,
                   fixed_rows=1, longest=2048, tokens_per_step=65536, micro_batches_per_step=8,
                   unpadded_tokens_per_step=65536)
    remedies = advise(run, Costs(run, device, target), target, peak=found.peak, usable_bytes=usable_bytes(device, 8.0),
                      native_bf16=True, progress=False)
print(json.dumps({"peak_bytes": found.peak.bytes, "found": None if remedies is None else len(remedies),
                  "replayed": replayed, "cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - start,
                  "rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))
"""
LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
LLAMA_70B = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
HEADS = {"8b": {"num_attention_heads": 32}, "70b": {"num_attention_heads": 64}}
QLORA = {"method": "qlora", "grad_ckpt": True, "loss_chunk": 512, "search": False}
FULL = {"method": "full", "grad_ckpt": False, "loss_chunk": None, "search": True}
CASES: dict[str, tuple[dict[str, Any], float]] = {
    "8B QLoRA verdict": ({**QLORA, "config": {**LLAMA_8B, **HEADS["8b"]}, "gpu": "RTX-4090"}, 10),
    "70B QLoRA verdict": ({**QLORA, "config": {**LLAMA_70B, **HEADS["70b"]}, "gpu": "A6000"}, 30),
    "8B full advice, A100-80GB": ({**FULL, "config": {**LLAMA_8B, **HEADS["8b"]}, "gpu": "A100-80GB"}, 60),
    "8B full advice, RTX-4090": ({**FULL, "config": {**LLAMA_8B, **HEADS["8b"]}, "gpu": "RTX-4090"}, 60),
}
"""What is asked, and the seconds it may take."""
QUICK_CASES = 1
MOST_RSS_GIB = 1.5


def measure(quick: bool) -> Measured:
    """Run every case once, or the first one alone."""
    rows: list[Row] = []
    bars = []
    for name, (case, limit_s) in list(CASES.items())[: QUICK_CASES if quick else None]:
        case["config"]["num_key_value_heads"] = 8
        done = subprocess.run(
            [sys.executable, "-c", CODE, json.dumps(case)], capture_output=True, text=True, check=True
        )
        row = json.loads(done.stdout.splitlines()[-1])
        rows.append({"case": name, **row})
        bars.append(Bar(name=f"{name}, CPU seconds", value=row["cpu_s"], rule="<=", limit=limit_s))
        gib = row["rss_bytes"] / 2**30
        bars.append(Bar(name=f"{name}, RSS GiB", value=gib, rule="<=", limit=MOST_RSS_GIB))
    return Measured(rows=rows, bars=bars)


if __name__ == "__main__":
    benchmark("estimate_speed", measure)()
