"""Cost of watching memory in stage train: samples in every phase, a row after every step, the search for growth.

The monitor is timed alone, since its share of a step is below a machine's noise: the samples of one step with the model
in memory, and all searches for growth of a long run, divided by its steps. The share is of a real optimizer step of a
small Llama (fp32, LoRA) without the monitor. tracemalloc counts the memory that the monitor retains.
"""

import gc
import tempfile
import time
import tracemalloc
from pathlib import Path
from statistics import median

import numpy as np
import torch
from transformers import LlamaForCausalLM

from benchmarks.harness import Bar, Measured, Row, at_most, benchmark
from cuda_memory.growth import classify
from lean_finetune.memory.trace.setting import Setting
from lean_finetune.train.monitor.growth_advice import FIRST_CHECK_STEPS, check_is_due
from lean_finetune.train.monitor.measured_peak import make_meter
from lean_finetune.train.monitor.memory_monitor import MemoryMonitor
from lean_finetune.train.process.training_device import training_device
from tests.kit.loaded import load_model
from tests.kit.specs import Trainer, changed, llama, padded, random_batch, train_of

SEED = 11
STEPS, QUICK_STEPS = 155, 10
SAMPLES, QUICK_SAMPLES = 2_000, 50
RUN_STEPS, QUICK_RUN_STEPS = 20_000, 200
"""Steps of the run whose growth is searched for."""
MICRO_BATCHES = 2
SHAPE = padded(4, 64, 4 * 32)
VOCABULARY = 2_048
"""Small, like the batches: the shorter a step, the larger the monitor's share."""
MODELS = {"2 layers of 128": (2, 128), "6 layers of 256": (6, 256)}
"""Layers and hidden size of the models."""
SHARE_LIMIT = 0.01
RETAINED_LIMIT_BYTES = 16 << 10


def measure(quick: bool) -> Measured:
    """Time steps and samples, for each model."""
    device = training_device()
    growth_s = _growth_seconds(QUICK_RUN_STEPS if quick else RUN_STEPS)
    steps, samples = (QUICK_STEPS, QUICK_SAMPLES) if quick else (STEPS, SAMPLES)
    table: list[Row] = []
    bars: list[Bar] = []
    for name, (layers, hidden) in MODELS.items():
        with tempfile.TemporaryDirectory() as directory:
            trainer = _trainer(Path(directory), layers, hidden, device)
            step_s = _step_seconds(trainer, device, steps)
            sample_s = _sample_seconds(MemoryMonitor(device, make_meter(device)), samples)
        share = (sample_s + growth_s) / step_s
        table.append(
            {
                "model": name,
                "step_ms": 1e3 * step_s,
                "looks_us": 1e6 * sample_s,
                "causes_us": 1e6 * growth_s,
                "percent": 100 * share,
            }
        )
        if not quick:  # Few rounds are too noisy.
            bars.append(at_most(f"share of a step, {name}", share, SHARE_LIMIT))
    retained = retained_bytes(MemoryMonitor(device, make_meter(device)), samples)
    bars.append(at_most(f"bytes retained after {samples} steps", retained, RETAINED_LIMIT_BYTES))
    return Measured(rows=table, bars=bars)


def _trainer(directory: Path, layers: int, hidden: int, device: torch.device) -> Trainer:
    """A small Llama with LoRA and its optimizer."""
    torch.manual_seed(SEED)
    config = llama(hidden, 3 * hidden, layers=layers, heads=4, kv_heads=2, vocabulary=VOCABULARY, tied=True)
    LlamaForCausalLM(config).save_pretrained(directory)
    spec = train_of("lora", "fp32", rank=8, grad_ckpt=False)
    setting = Setting(train=changed(spec, optimizer="adamw", loss_chunk=256, max_grad_norm=1.0))
    return Trainer.of(load_model(directory, spec, device), setting, device)


def _step_seconds(trainer: Trainer, device: torch.device, steps: int) -> float:
    """Median seconds of an optimizer step with the meter alone, up to the value of its loss."""
    meter, taken = make_meter(device), []
    for _ in range(steps):
        start = time.perf_counter()
        batches = (random_batch(SHAPE, VOCABULARY, device) for _ in range(MICRO_BATCHES))
        trainer.step(batches, MICRO_BATCHES * SHAPE.supervised, meter.phase).loss.item()
        taken.append(time.perf_counter() - start)
    return median(taken)


def _sample(monitor: MemoryMonitor) -> None:
    """Everything that the monitor adds to a step, without the step."""
    for name in (*("forward", "backward") * MICRO_BATCHES, "clip", "optimizer"):
        with monitor.phase(name):
            pass
    monitor.step_columns()


def _sample_seconds(monitor: MemoryMonitor, samples: int) -> float:
    """Median seconds of one step's samples; an upper bound, since it includes the meter's own phases."""
    taken = []
    for _ in range(samples):
        start = time.perf_counter()
        _sample(monitor)
        taken.append(time.perf_counter() - start)
    return median(taken)


def _growth_seconds(steps: int) -> float:
    """Seconds per step of searching a long run for growth, as often as stage train does."""
    draw = np.random.default_rng(SEED)
    tokens = np.clip(draw.lognormal(5.2, 0.9, steps), 16, 2048).round()
    peaks = 1e9 + 2e6 * tokens + draw.normal(0, 1e6, steps)
    rows = [
        {
            "step": step,
            "largest_micro_batch_tokens": int(tokens[step]),
            "longest_row": int(tokens[step]),
            "allocated_bytes": int(peaks[step]),
            "live_bytes": 10**9,
            "reserved_bytes": int(peaks[: step + 1].max()) if step < FIRST_CHECK_STEPS else 6 * 10**9,
            "rss_bytes": 2 * 10**9,
            "rss_own_bytes": 10**9,
        }
        for step in range(steps)
    ]
    start = time.perf_counter()
    for due in filter(check_is_due, range(steps + 1)):
        classify(rows[:due])
    return (time.perf_counter() - start) / steps


def retained_bytes(monitor: MemoryMonitor, steps: int) -> int:
    """Growth of Python's memory over this many steps of the monitor, after ten that do not count."""
    for _ in range(10):
        _sample(monitor)
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(steps):
            _sample(monitor)
        gc.collect()
        return max(0, tracemalloc.get_traced_memory()[0] - before)
    finally:
        tracemalloc.stop()


if __name__ == "__main__":
    benchmark("monitor", measure)()
