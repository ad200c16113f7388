"""Compare this project's kernels with bitsandbytes' on a device, and time both.

Also the buffers of PyTorch's fused RMSNorm in backward, from which a rule for trained norms can be made.
"""

from collections.abc import Callable
from statistics import median
from typing import Any

import bitsandbytes as bnb
import torch

from benchmarks.gpu.speed import seconds_of
from benchmarks.harness import Row
from lean_finetune.step.adamw_8bit import AdamW8bit

STEPS = 4
SIZES = (8192, 70_001, 2**22)
"""Values of a tensor: 32 blocks, a last block that is not full, and many blocks."""
LARGE = 200_000_000
ADAPTERS = 448, (16, 4096)
"""Number and shape of tensors like the adapters of an 8B."""
NORMS = ((4096, 4096), (2048, 4096), (8192, 4096), (1024, 3072), (8192, 2048), (64, 4096), (4096, 1536), (512, 896))
"""Rows and columns."""


def measured(device: torch.device) -> Row:
    """Differences of codes, scales and weights after some updates, and milliseconds."""
    sizes = SIZES if device.type == "cuda" else SIZES[:1]
    types = (torch.bfloat16, torch.float16, torch.float32)
    row: dict[str, Any] = {f"{dtype}, {size}": compared(size, dtype, device) for dtype in types for size in sizes}
    if device.type != "cuda":
        return row
    large = [weight((LARGE,), torch.bfloat16, device)]
    count, shape = ADAPTERS
    small = [weight(shape, torch.float32, device) for _ in range(count)]
    for name, kind in (("ours", AdamW8bit), ("bitsandbytes", bnb.optim.AdamW8bit)):
        row[f"{LARGE:,} bf16 weights, {name}, ms"] = milliseconds(kind(large, lr=1e-5).step, device)
        row[f"{count} adapters, {name}, ms"] = milliseconds(kind(small, lr=1e-5).step, device)
    row["norm_backward_bytes"] = {f"{rows} x {columns}": norm_buffers(rows, columns, device) for rows, columns in NORMS}
    return row


def compared(values: int, dtype: torch.dtype, device: torch.device) -> Row:
    """Largest differences between our update and bitsandbytes' after some steps, and each one's from fp32 AdamW."""
    torch.manual_seed(0)
    start = torch.randn(values, device=device) * 0.02
    ours, theirs = (torch.nn.Parameter(start.to(dtype)) for _ in range(2))
    exact = torch.nn.Parameter(start.to(dtype).float())
    given: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1}
    own, other = AdamW8bit([ours], **given), bnb.optim.AdamW8bit([theirs], **given)
    optimizers = (own, other, torch.optim.AdamW([exact], **given))
    for step in range(STEPS):
        gradient = torch.randn(values, device=device) * 10.0 ** (step - 4)
        gradient[::7] = 0
        for parameter, optimizer in zip((ours, theirs, exact), optimizers, strict=True):
            parameter.grad = gradient.to(parameter.dtype)
            optimizer.step()
    states = own.state[ours], other.state[theirs]
    row: dict[str, Any] = {
        "weights": (ours - theirs).abs().max().item(),
        "ours_from_fp32": (ours - exact).abs().mean().item(),
        "bitsandbytes_from_fp32": (theirs - exact).abs().mean().item(),
    }
    for key in ("state1", "state2"):
        codes = [state[key].float() for state in states]
        row[f"{key}_equal"] = (codes[0] == codes[1]).float().mean().item()
        row[f"{key}_levels_apart"] = (codes[0] - codes[1]).abs().max().item()
    return row


def weight(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.nn.Parameter:
    """A random weight with a gradient."""
    parameter = torch.nn.Parameter(torch.randn(shape, dtype=dtype, device=device) * 0.02)
    parameter.grad = torch.randn_like(parameter) * 1e-3
    return parameter


def milliseconds(work: Callable[[], object], device: torch.device) -> float:
    """The median of five, after two."""
    return round(1000 * median([seconds_of(work, device) for _ in range(7)][2:]), 3)


def norm_buffers(rows: int, columns: int, device: torch.device) -> list[list[int]]:
    """Bytes of each allocation of a fused RMSNorm's backward: of the input's gradient alone, and with the weight's."""
    x = torch.randn(rows, columns, dtype=torch.bfloat16, device=device)
    scale = torch.ones(columns, dtype=torch.bfloat16, device=device)
    _, rstd = torch.ops.aten._fused_rms_norm(x, [columns], scale, 1e-5)
    found = []
    for mask in ([True, False], [True, True]):
        torch.cuda.memory._record_memory_history(max_entries=1000)
        torch.ops.aten._fused_rms_norm_backward(x, x, [columns], rstd, scale, mask)
        events = torch.cuda.memory._snapshot()["device_traces"][device.index or 0]
        torch.cuda.memory._record_memory_history(enabled=None)
        found.append([event["size"] for event in events if event["action"] == "alloc"])
    return found
