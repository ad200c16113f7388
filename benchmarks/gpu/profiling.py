"""Say where the time of a training step goes: its kernels by kind and by operation, and when the GPU waits.

All figures are per step. Times of kernels come from PyTorch's profiler, which slows the host down. So the share of time
in which the GPU is idle is computed for the wall time of steps without it.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.cases import ProfileCase
from benchmarks.gpu.speed import Step, seconds_of, timed_step, wait_for
from benchmarks.harness import Row
from lean_finetune.model.allocator_settings import use_segments

PLAIN_STEPS, PROFILED_STEPS = 3, 2
MOST_ROWS = 25
NAME_LENGTH = 110
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of the profiler's events that take time of the GPU."""
HOST_CALLS = ("cuda_runtime", "cuda_driver")
AT_ONCE_US = 20
"""A kernel that starts this soon after its launch found the GPU idle: the host was too slow, or had waited."""
ATTENTION = ("flash", "fmha", "attention", "cudnn_sdpa")
MATMULS = {f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "_int_mm", "_grouped_mm")}
COPIES = {f"aten::{name}" for name in ("copy_", "_to_copy", "clone", "cat", "fill_", "zero_")}
REDUCTIONS = {f"aten::{name}" for name in ("sum", "mean", "amax", "max", "linalg_vector_norm", "norm")}
LOOKUPS = ("aten::index", "aten::gather", "aten::scatter", "aten::embedding")

Event = Mapping[str, Any]


def measured(case: ProfileCase, device: torch.device) -> Row:
    """Where the time of a step goes."""
    use_segments(True, device)
    step, _ = timed_step(case.speed, device)
    seconds = [seconds_of(step, device) for _ in range(2 * PLAIN_STEPS)][PLAIN_STEPS:]
    wall_s = median(seconds)
    on_gpu = ON_GPU if device.type == "cuda" else ("cpu_op",)
    return {
        "tokens_per_s": round(case.speed.rows * case.speed.length / wall_s, 1),
        "seconds": [round(each, 4) for each in seconds],
        "phases_ms": phases_ms(step, device),
        **summary(profiled(step, device), 1000 * wall_s, on_gpu),
        "attention": attention_ms(case, device),
    }


def attention_ms(case: ProfileCase, device: torch.device) -> Mapping[str, float | str]:
    """Time of a layer's attention, forward and backward, by each kernel of PyTorch, or why there is none."""
    config = case.speed.config.get_text_config()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    query, key, value = (
        torch.randn(
            (case.speed.rows, heads, case.speed.length, size), dtype=torch.bfloat16, device=device, requires_grad=True
        )
        for heads in (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
    )

    def once() -> None:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        out.backward(torch.ones_like(out))

    found: dict[str, float | str] = {}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        try:
            with sdpa_kernel(backend):
                once()
                found[backend.name] = round(1000 * min(seconds_of(once, device) for _ in range(5)), 3)
        except RuntimeError as error:  # No kernel on this device.
            found[backend.name] = str(error).splitlines()[0]
    return found


def phases_ms(step: Step, device: torch.device) -> Mapping[str, float]:
    """Time of each phase with the device's work, and until the host has launched it: the median of some steps."""
    found = defaultdict[str, list[float]](list)

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        wait_for(device)
        start = perf_counter()
        yield
        found[f"{name}, host"].append(perf_counter() - start)
        wait_for(device)
        found[name].append(perf_counter() - start)

    for _ in range(PLAIN_STEPS):
        step(phase)
    return {name: round(1000 * median(times), 2) for name, times in found.items()}


def profiled(step: Step, device: torch.device) -> list[Event]:
    """The profiler's events of some steps."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities, record_shapes=True) as profiler:
        for _ in range(PROFILED_STEPS):
            seconds_of(step, device)
    with TemporaryDirectory() as scratch:
        path = Path(scratch) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[Event] = json.loads(path.read_bytes())["traceEvents"]
    return events


def summary(events: Iterable[Event], wall_ms: float, on_gpu: Sequence[str] = ON_GPU) -> Row:
    """The columns of a row.

    Args:
        events: of PROFILED_STEPS steps, as in Chrome's trace format: times in microseconds.
        wall_ms: of a step without the profiler.
        on_gpu: categories of the events that count as kernels.
    """
    by_category = defaultdict[str, list[Event]](list)
    for event in events:
        if event.get("ph") == "X":
            by_category[event.get("cat", "")].append(event)
    operations = {event["args"].get("External id"): event for event in by_category["cpu_op"]}
    calls = [event for category in HOST_CALLS for event in by_category[category]]
    kernels = [event for category in on_gpu for event in by_category[category]]
    launches = [call for call in calls if "Launch" in call["name"]]
    waits = [call for call in calls if "Synchronize" in call["name"] or "Memcpy" in call["name"]]
    owners = [operations.get(kernel["args"].get("External id"), {}) for kernel in kernels]
    busy_ms = _busy_us(kernels) / 1000 / PROFILED_STEPS
    return {
        "wall_ms": round(wall_ms, 2),
        "kernels_ms": round(sum(kernel["dur"] for kernel in kernels) / 1000 / PROFILED_STEPS, 2),
        "busy_ms": round(busy_ms, 2),
        "idle_percent": round(100 * (1 - busy_ms / wall_ms), 2),
        "launches": len(launches) / PROFILED_STEPS,
        "started_at_once_percent": _started_at_once(kernels, launches),
        "groups": _totals(zip(map(group_of, kernels, owners), kernels, strict=True)),
        "operations": _totals(zip(map(_described, owners), kernels, strict=True)),
        "kernels": _totals((kernel["name"][:NAME_LENGTH], kernel) for kernel in kernels),
        "host_waits": _totals((call["name"], call) for call in waits),
    }


def group_of(kernel: Event, operation: Event) -> str:
    """The kind of work of a kernel, by its name and the operation that launched it."""
    name, kernel_name = operation.get("name", ""), kernel["name"].lower()
    if any(word in name or word in kernel_name for word in ATTENTION):
        return "attention"
    if name in MATMULS:
        types = {kind for kind in operation["args"].get("Input type", []) if kind}
        return "matmul fp32" if "float" in types else "matmul bf16"
    if name.startswith(("aten::_foreach", "aten::_fused")) or "multi_tensor" in kernel_name:
        return "clip, optimizer"
    if "4bit" in kernel_name or "dequant" in kernel_name:
        return "dequantise"
    if name in COPIES or "memcpy" in kernel_name or "memset" in kernel_name:
        return "copies"
    if name in REDUCTIONS or "reduce_kernel" in kernel_name:
        return "reductions"
    return "lookups" if name.startswith(LOOKUPS) else "elementwise"


def _described(operation: Event) -> str:
    """An operation with the shapes and types of its tensors."""
    if not operation:
        return "unknown"
    arguments = operation["args"]
    tensors = [
        f"{kind.removeprefix('c10::')}{dims}"
        for dims, kind in zip(arguments.get("Input Dims", []), arguments.get("Input type", []), strict=False)
        if dims and kind
    ]
    return f"{operation['name']} {' '.join(tensors)}"[:NAME_LENGTH]


def _totals(named: Iterable[tuple[str, Event]]) -> list[Row]:
    """Milliseconds and number of events per step by name, the longest first."""
    found: dict[str, list[float]] = defaultdict(list)
    for name, event in named:
        found[name].append(event["dur"])
    longest = sorted(found.items(), key=lambda item: -sum(item[1]))[:MOST_ROWS]
    return [
        {"name": name, "ms": round(sum(times) / 1000 / PROFILED_STEPS, 3), "number": len(times) / PROFILED_STEPS}
        for name, times in longest
    ]


def _busy_us(kernels: Iterable[Event]) -> float:
    """Time in which at least one kernel ran."""
    busy, end = 0.0, float("-inf")
    for start, duration in sorted((kernel["ts"], kernel["dur"]) for kernel in kernels):
        busy += max(0.0, start + duration - max(start, end))
        end = max(end, start + duration)
    return busy


def _started_at_once(kernels: Iterable[Event], launches: Iterable[Event]) -> float | None:
    """The share of kernels, in percent, that did not wait for others on the GPU; None without launches."""
    launched = {call["args"].get("correlation"): call["ts"] + call["dur"] for call in launches}
    numbered = [(kernel["args"].get("correlation"), kernel["ts"]) for kernel in kernels]
    waits = [start - launched[number] for number, start in numbered if number in launched]
    return round(100 * sum(wait < AT_ONCE_US for wait in waits) / len(waits), 1) if waits else None
