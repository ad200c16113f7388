"""Time training steps on a device. trl_steps.py times TRL's with the same settings.

MFU is the arithmetic that tokens need (4 FLOP per frozen weight, 6 per trained one, and attention) as a share of 989
TFLOP/s.
"""

import contextlib
from collections.abc import Callable, Mapping
from statistics import median
from time import perf_counter

import torch
from torch import nn

from benchmarks.gpu.cases import LORA_4096, QLORA_LEAST, SpeedCase, TrlCase
from benchmarks.harness import Bar, Row, at_least, at_most
from lean_finetune.model.allocator_settings import use_segments
from lean_finetune.step.training_step import Phase
from tests.kit.random_model import free_cached, random_model
from tests.kit.specs import Trainer, random_batch

WARM_UP_STEPS, TIMED_STEPS = 3, 7
PEAK_FLOPS = 989e12
"""Dense bf16 of an H100 or H200 (data sheet): the base of MFU."""
FLOPS_FROZEN, FLOPS_TRAINED = 4, 6
"""FLOP per weight and token: two products of 2 FLOP, and a third one for the gradient of a trained weight."""
FLOPS_SCORES = 6
"""FLOP per layer, width and token of the row: causal scores and their product with values, forward and twice back."""


Step = Callable[..., float]
"""Runs a training step and returns its loss; may be called with what opens its phases."""


def measured(case: SpeedCase, device: torch.device, steps: int = WARM_UP_STEPS + TIMED_STEPS) -> Row:
    """Tokens per second of our training step and its memory, or why there are none."""
    use_segments(True, device)
    try:
        row = _timed(case, device, steps)
    except torch.OutOfMemoryError as error:
        return {"out_of_memory": str(error).splitlines()[0]}
    return {**row, "matmul_flops": matmul_flops(device)}


def _timed(case: SpeedCase, device: torch.device, steps: int) -> Row:
    """Warm up, then time steps one by one. Peaks are those of the steps, without loading."""
    step, trainer = timed_step(case, device)
    seconds = [seconds_of(step, device) for _ in range(steps)][WARM_UP_STEPS:]
    tokens_per_s = case.rows * case.length / median(seconds)
    return {
        "tokens_per_s": round(tokens_per_s, 1),
        "seconds": [round(each, 4) for each in seconds],
        "mfu_percent": round(100 * flops_per_token(trainer.model, case) * tokens_per_s / PEAK_FLOPS, 2),
        "allocated_bytes": torch.cuda.max_memory_allocated(device),
        "reserved_bytes": torch.cuda.max_memory_reserved(device),
    }


def timed_step(case: SpeedCase, device: torch.device) -> tuple[Step, Trainer]:
    """Load random weights, and return a function that runs a step, with its trainer. Peaks count from then on."""
    trainer = Trainer.of(random_model(case.config, case.setting.train, device), case.setting, device)
    free_cached()
    torch.cuda.reset_peak_memory_stats(device)
    batch = random_batch(case.shape, case.config.get_text_config().vocab_size, device)

    def step(phase: Phase = lambda name: contextlib.nullcontext()) -> float:
        # Reading the loss waits for the device, as the loop of stage train does.
        return trainer.step([batch], case.shape.supervised, phase).loss.item()

    return step, trainer


def flops_per_token(model: nn.Module, case: SpeedCase) -> float:
    """Arithmetic that one token's training needs, without recomputation.

    Counts the weights that a token is multiplied with: all but the input embedding, which is a table lookup. Quantised
    weights count by the shape of their layer.
    """
    frozen = trained = 0
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad:
                trained += parameter.numel()
            elif isinstance(module, nn.Linear) and name == "weight":  # bitsandbytes' layers are nn.Linear too.
                frozen += module.in_features * module.out_features
    text = case.config.get_text_config()
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    scores = FLOPS_SCORES * text.num_hidden_layers * text.num_attention_heads * head_size * case.length
    return FLOPS_FROZEN * frozen + FLOPS_TRAINED * trained + scores


def matmul_flops(device: torch.device) -> float:
    """FLOP/s of a large bf16 product on a device, the best of ten: what its clock and cooling allow."""
    size = 8192 if device.type == "cuda" else 256
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / min(seconds_of(lambda: torch.mm(a, b), device) for _ in range(10))


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Wall seconds of some work, including the device's."""
    wait_for(device)
    start = perf_counter()
    work()
    wait_for(device)
    return perf_counter() - start


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has done what was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def bars(rows: Mapping[str, Row]) -> list[Bar]:
    """The bars of the rows that were measured."""
    found: list[Bar] = []
    for name, row in rows.items():
        if "mfu_percent" not in row:
            continue
        if name == LORA_4096:
            limit = 12_473 * row["matmul_flops"] / PEAK_FLOPS
            found.append(at_least(f"{name}: tokens/s", row["tokens_per_s"], limit))
            found.append(at_least(f"{name}: MFU, percent", row["mfu_percent"], 41.0))
        if name == QLORA_LEAST:
            found.append(at_most(f"{name}: allocated, GiB", row["allocated_bytes"] / 2**30, 7.4))
        if row.get("reserved_bytes") is not None:
            share = row["reserved_bytes"] / row["allocated_bytes"]
            found.append(at_most(f"{name}: reserved / allocated", share, 1.05))
        trl = rows.get(TrlCase.prefix + name, {})
        if "tokens_per_s" in trl:
            found.append(at_least(f"{name}: ours / TRL", row["tokens_per_s"] / trl["tokens_per_s"], 1.2))
    return found
