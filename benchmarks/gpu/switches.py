"""Time a training step with switches on and off, interleaved in one process on one card.

The model is built anew for each measurement: a second or two for an 8B, after which peaks belong to one variant alone.
"""

from typing import Any

import torch

from benchmarks.gpu.cases import SwitchesCase
from benchmarks.gpu.speed import PEAK_FLOPS, flops_per_token, matmul_flops, seconds_of, timed_step
from benchmarks.harness import Row
from lean_finetune.model.allocator_settings import use_segments
from tests.kit.random_model import free_cached

ROUNDS, WARM_UP_STEPS, TIMED_STEPS = 2, 2, 3
SEED = 0
"""All variants have the same weights and rows, so their losses may be compared."""


def measured(case: SwitchesCase, device: torch.device) -> Row:
    """Tokens per second and peaks of every variant, or why there are none."""
    use_segments(True, device)
    rows: dict[str, dict[str, Any]] = {}
    for _ in range(ROUNDS):
        for name in case.variants:
            row = rows.setdefault(name, {"name": name, "seconds": []})
            try:
                _add_round(row, case, name, device)
            except torch.OutOfMemoryError as error:
                row["out_of_memory"] = str(error).splitlines()[0]
            free_cached()
    return {"variants": list(rows.values()), "matmul_flops": matmul_flops(device)}


def _add_round(row: dict[str, Any], case: SwitchesCase, name: str, device: torch.device) -> None:
    """Add the seconds of some steps to a variant's row, with the peaks of these steps."""
    speed = case.variant(name)
    torch.manual_seed(SEED)
    step, trainer = timed_step(speed, device)
    losses: list[float] = []
    seconds = [seconds_of(lambda: losses.append(step()), device) for _ in range(WARM_UP_STEPS + TIMED_STEPS)]
    seconds = seconds[WARM_UP_STEPS:]
    row["losses"] = losses
    row["seconds"] += [round(each, 4) for each in seconds]
    tokens_per_s = speed.rows * speed.length / sorted(row["seconds"])[len(row["seconds"]) // 2]
    row["tokens_per_s"] = round(tokens_per_s, 1)
    row["mfu_percent"] = round(100 * flops_per_token(trainer.model, speed) * tokens_per_s / PEAK_FLOPS, 2)
    row["allocated_bytes"] = torch.cuda.max_memory_allocated(device)
    row["reserved_bytes"] = torch.cuda.max_memory_reserved(device)
