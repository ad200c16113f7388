"""CPU seconds of a prediction: verdicts of 8B and 70B and the search for advice, on one core without weights.

Each case runs in a new process with one thread. Seconds are CPU seconds after imports, which equal wall seconds on an
idle core.
"""

import resource
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.harness import Measured, Row, at_most, benchmark, in_new_processes
from benchmarks.specs import changed, llama, train_of
from lean_finetune.config.field_types import Method
from lean_finetune.config.load import COMMON_PARAMS, load_params, with_flags
from lean_finetune.memory.advice.plan_memory import replay_plan
from lean_finetune.memory.advice.run import Run, full_batch, largest_steps
from lean_finetune.memory.advice.search import advise
from lean_finetune.memory.advice.step_cost import Costs
from lean_finetune.memory.devices import resolve_gpu
from lean_finetune.memory.predict.peak import predict, predict_explained
from lean_finetune.memory.predict.traced_step import TracedModel
from lean_finetune.memory.trace.cuda_kernels import target_of
from lean_finetune.memory.trace.setting import Setting
from lean_finetune.plan.batch_plan import MicroBatch, Plan

STEPS, MICRO_BATCHES = 10_000, 8
MAX_TOKENS, LONGEST = 8192, 2048
SIZES = {"8B": (4096, 14336, 32, 32), "70B": (8192, 28672, 80, 64)}
"""Hidden size, intermediate size, layers and heads."""
MOST_RSS_GIB = 1.5


@dataclass(frozen=True, kw_only=True)
class Case:
    """A question, and the CPU seconds that its answer may take."""

    size: str
    gpu: str
    limit_s: float
    advice: bool = False
    """Predict full fine-tuning without checkpointing and search for advice; else QLoRA's verdict."""

    @property
    def name(self) -> str:
        """Its name in the table."""
        return f"{self.size} full advice, {self.gpu}" if self.advice else f"{self.size} QLoRA verdict"


CASES = (
    Case(size="8B", gpu="RTX-4090", limit_s=10),
    Case(size="70B", gpu="A6000", limit_s=30),
    Case(size="8B", gpu="A100-80GB", limit_s=60, advice=True),
    Case(size="8B", gpu="RTX-4090", limit_s=60, advice=True),
)


def answer(case: Case) -> Row:
    """Answer a case; meant for a new process, whose memory it measures."""
    torch.set_num_threads(1)
    hidden, intermediate, layers, heads = SIZES[case.size]
    config = llama(hidden, intermediate, layers=layers, heads=heads, kv_heads=8, max_position_embeddings=131072)
    method: Method = "full" if case.advice else "qlora"
    spec = train_of(method, grad_ckpt=not case.advice)
    setting = Setting(
        train=changed(spec, optimizer="adamw", loss_chunk=None if case.advice else 512, max_grad_norm=1.0)
    )
    device, _ = resolve_gpu(case.gpu)
    target = target_of(device)
    p = load_params(COMMON_PARAMS)
    bucket = p.bucket.model_copy(update={"mode": "bucketed", "max_tokens": MAX_TOKENS})
    steps = largest_steps(full_batch(bucket, LONGEST), several=True)
    found: dict[str, Any] = {"found": None, "replayed": None}
    start, cpu = time.perf_counter(), time.process_time()
    if case.advice:
        prediction = predict(TracedModel(config, setting, target), steps)
        run = Run(
            params=with_flags(p, ["run.progress=false"]),
            device=device,
            config=config,
            setting=setting.with_train(tokens_per_step=65536),
            stored=torch.bfloat16,
            bucket=bucket,
            steps=prediction.steps_of_peak,
            longest=LONGEST,
            tokens_per_step=65536,
            micro_batches_per_step=MICRO_BATCHES,
        )
        found["found"] = len(advise(run, Costs(run), peak=prediction.peak, usable_bytes=device.usable_bytes(8.0)))
    else:  # As stage estimate does: with the peak's breakdown and the plan's reserved memory.
        model = TracedModel(config, setting, target)
        prediction, _ = predict_explained(model, steps)
        memory, found["replayed"] = replay_plan(
            _plan(),
            np.full(MAX_TOKENS, 8),
            TracedModel(config, setting, target),
            prediction,
            expandable=True,
            device=device,
        )
        assert memory is not None, found["replayed"]
    return {
        "case": case.name,
        "peak_bytes": prediction.peak.bytes,
        **found,
        "cpu_s": time.process_time() - cpu,
        "wall_s": time.perf_counter() - start,
        "rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _plan() -> Plan:
    """A plan of many steps, whose micro-batches have many lengths."""
    lengths = [8, LONGEST] + [8 * (29 + 37 * number % 227) for number in range(STEPS * MICRO_BATCHES - 2)]
    rows = [1] + [MAX_TOKENS // length for length in lengths[1:]]
    return Plan.of(
        [
            MicroBatch(
                epoch=0,
                step=number // MICRO_BATCHES,
                rows=np.arange(count),
                length=length,
                supervised=count * (length - 1),
            )
            for number, (count, length) in enumerate(zip(rows, lengths, strict=True))
        ]
    )


def measure(quick: bool) -> Measured:
    """Answer every case once; with `quick` the first one only."""
    chosen = CASES[: 1 if quick else None]
    rows = in_new_processes(answer, chosen)
    bars = []
    for case, row in zip(chosen, rows, strict=True):
        gib = row["rss_bytes"] / 2**30
        if not quick:  # CPU seconds depend on the machine and on what else it runs.
            bars.append(at_most(f"{case.name}, CPU seconds", row["cpu_s"], case.limit_s))
        bars.append(at_most(f"{case.name}, RSS GiB", gib, MOST_RSS_GIB))
    return Measured(rows=rows, bars=bars)


if __name__ == "__main__":
    benchmark("estimate_speed", measure)()
