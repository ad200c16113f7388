"""What watching memory costs stage train: a look after every phase, a row after every step, the causes of growth.

Real optimizer steps of a small Llama (fp32, LoRA) run as in stage train, watched and not, interleaved. Watching alone
is also timed by itself, as the difference is less than a machine's noise: the looks of a step with the model in memory,
and all looks for causes over a long run, spread over its steps. What the monitor keeps is counted by tracemalloc.
"""

import gc
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.form import Bar, Measured, Row, benchmark, interleaved_seconds, median_ratio
from benchmarks.specs import FP32_LORA
from lean_finetune.model.load_model import load_model
from lean_finetune.step.batches import Batch, collate
from lean_finetune.step.run_optimizer import OptimSpec, build_optimizer
from lean_finetune.step.training_step import Phase, StepSpec, training_step
from lean_finetune.train.monitor.growth_advice import FIRST_LOOK_STEPS, NEXT_LOOK, GrowthWatch
from lean_finetune.train.monitor.measured_peak import Meter, make_meter
from lean_finetune.train.monitor.memory_monitor import Monitor
from lean_finetune.train.process.training_device import training_device

SEED = 11
ROUNDS, QUICK_ROUNDS = 31, 2
STEPS_A_ROUND = 5
LOOKS, QUICK_LOOKS = 2_000, 50
RUN_STEPS, QUICK_RUN_STEPS = 20_000, 200
"""Of the run whose causes of growth are looked for."""
ROWS, LENGTH, MICRO_BATCHES = 4, 64, 2
VOCABULARY = 2_048
"""Small, as are the batches: the shorter the steps, the larger the share of watching them."""
SHARE_LIMIT = 0.01
KEPT_LIMIT_BYTES = 16 << 10


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model of random weights."""

    name: str
    hidden: int
    layers: int


SIZES = (Size(name="2 layers of 128", hidden=128, layers=2), Size(name="6 layers of 256", hidden=256, layers=6))


class Ground:
    """A model with its optimizer and batches, as stage train has them between two steps."""

    def __init__(self, directory: Path, size: Size, device: torch.device):
        """Make and load the model."""
        torch.manual_seed(SEED)
        config = LlamaConfig(
            hidden_size=size.hidden,
            intermediate_size=3 * size.hidden,
            num_hidden_layers=size.layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=VOCABULARY,
            max_position_embeddings=LENGTH,
            tie_word_embeddings=True,
        )
        LlamaForCausalLM(config).save_pretrained(directory)
        self.device = device
        self.model: nn.Module = load_model(directory, FP32_LORA, device)
        optim = OptimSpec(name="adamw", lr=1e-4, weight_decay=0.0, schedule="constant", warmup_fraction=0.0)
        self.optimizer = build_optimizer(self.model, optim)
        draw = np.random.default_rng(SEED)
        spans = np.array([[LENGTH // 2, LENGTH]], dtype=np.int32)
        self.batches = [
            collate([(draw.integers(3, VOCABULARY, LENGTH).astype(np.uint16), spans) for _ in range(ROWS)], LENGTH, 0)
            for _ in range(MICRO_BATCHES)
        ]

    def step(self, phase: Phase) -> None:
        """One optimizer step."""
        batches: Iterator[Batch] = (batch.to(self.device) for batch in self.batches)
        result = training_step(
            self.model,
            self.optimizer,
            batches,
            supervised_tokens=sum(len(batch.supervised_index_N) for batch in self.batches),
            model_spec=FP32_LORA,
            spec=StepSpec(loss_chunk=256, max_grad_norm=1.0, foreach=self.device.type == "cuda"),
            phase=phase,
            guard=lambda losses, norm: None,
        )
        result.loss.item()


def measure(quick: bool) -> Measured:
    """Time steps and looks, for each size of model."""
    device = training_device()
    classifying_s, rows = _classifying_seconds(QUICK_RUN_STEPS if quick else RUN_STEPS)
    table: list[Row] = []
    bars: list[Bar] = []
    for size in SIZES:
        with tempfile.TemporaryDirectory() as directory:
            ground = Ground(Path(directory), size, device)
            meter = make_meter(device)
            monitor = Monitor(device, meter)
            bare, watched = partial(_bare_steps, ground, meter), partial(_watched_steps, ground, monitor, rows)
            seconds = interleaved_seconds({"bare": bare, "watched": watched}, QUICK_ROUNDS if quick else ROUNDS)
            step_s = median(seconds["bare"]) / STEPS_A_ROUND
            looks_s = _looking_seconds(Monitor(device, meter), QUICK_LOOKS if quick else LOOKS)
            share = (looks_s + classifying_s) / step_s
            table.append(
                {
                    "model": size.name,
                    "step_ms": 1e3 * step_s,
                    "looks_us": 1e6 * looks_s,
                    "causes_us": 1e6 * classifying_s,
                    "percent": 100 * share,
                    "percent, interleaved": 100 * (median_ratio(seconds["watched"], seconds["bare"]) - 1),
                }
            )
            bars.append(Bar(name=f"share of a step, {size.name}", value=share, rule="<=", limit=SHARE_LIMIT))
    kept = kept_bytes(Monitor(device, make_meter(device)), QUICK_LOOKS if quick else LOOKS)
    bars.append(Bar(name=f"bytes kept of {LOOKS} steps", value=kept, rule="<=", limit=KEPT_LIMIT_BYTES))
    return Measured(rows=table, bars=bars)


def _bare_steps(ground: Ground, meter: Meter) -> None:
    """Steps that the meter alone sees."""
    for _ in range(STEPS_A_ROUND):
        ground.step(meter.phase)
        meter.peak_bytes_of_step()


def _watched_steps(ground: Ground, monitor: Monitor, rows: list[dict[str, Any]]) -> None:
    """The same as stage train watches them; the rows are of a run in which no look for causes is due."""
    for _ in range(STEPS_A_ROUND):
        ground.step(monitor.phase)
        monitor.step()
        monitor.tell_growth(rows[: FIRST_LOOK_STEPS - 1], {}, _nobody)


def _nobody(line: str) -> None:
    """Hears nothing."""


def _look_at_a_step(monitor: Monitor) -> None:
    """All that watching adds to a step, without the step."""
    for name in (*("forward", "backward") * MICRO_BATCHES, "clip", "optimizer"):
        with monitor.phase(name):
            pass
    monitor.step()


def _looking_seconds(monitor: Monitor, looks: int) -> float:
    """Seconds for the looks of one step; what the meter's own phases take is part of them, so this is too much."""
    return _seconds(partial(_look_at_a_step, monitor), looks)


def _seconds(act: Callable[[], Any], times: int) -> float:
    """Median seconds of an act."""
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        act()
        taken.append(time.perf_counter() - start)
    return median(taken)


def _classifying_seconds(steps: int) -> tuple[float, list[dict[str, Any]]]:
    """Seconds per step of looking for causes of growth over a long run, as often as stage train does; and its rows."""
    draw = np.random.default_rng(SEED)
    tokens = np.clip(draw.lognormal(5.2, 0.9, steps), 16, 2048).round()
    peaks = 1e9 + 2e6 * tokens + draw.normal(0, 1e6, steps)
    rows = [
        {
            "step": step,
            "largest_micro_batch_tokens": int(tokens[step]),
            "longest_row": int(tokens[step]),
            "allocated_bytes": int(peaks[step]),
            "held_bytes": 10**9,
            "held_reserved_bytes": int(peaks[: step + 1].max()) if step < FIRST_LOOK_STEPS else 6 * 10**9,
            "rss_bytes": 2 * 10**9,
            "rss_own_bytes": 10**9,
        }
        for step in range(steps)
    ]
    watch, look, start = GrowthWatch(), FIRST_LOOK_STEPS, time.perf_counter()
    while look <= steps:
        watch.look(rows[:look])
        look = round(look * NEXT_LOOK)
    return (time.perf_counter() - start) / steps, rows


def kept_bytes(monitor: Monitor, steps: int) -> int:
    """Bytes of Python objects that are there after so many steps and were not after the first ones."""
    for _ in range(10):
        _look_at_a_step(monitor)
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(steps):
            _look_at_a_step(monitor)
        gc.collect()
        return max(0, tracemalloc.get_traced_memory()[0] - before)
    finally:
        tracemalloc.stop()


main = benchmark("monitor", measure)

if __name__ == "__main__":
    main()
