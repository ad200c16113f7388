"""Operations that a layer launches on a GPU, what it saves, and the peaks of a step: by plain code, and as it is now.

Counted, not timed: the step is traced as the estimate traces it, with two and three layers of Llama 3.1 8B on an H100,
1 × 4096 tokens, and the difference is a layer's. An operation counts if it makes or changes memory. Traffic is the
bytes that operations other than products and attention read and write, at the GPU's bandwidth. Peaks are predictions.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_iter

from benchmarks.harness import Measured, Row, at_most, benchmark
from lean_finetune.memory.devices import resolve_gpu
from lean_finetune.memory.predict.peak import predict
from lean_finetune.memory.predict.traced_step import TracedModel, trace_steps
from lean_finetune.memory.trace.cuda_kernels import target_of
from lean_finetune.memory.trace.memory_trace import ACTIVATIONS, MemoryTrace
from lean_finetune.memory.trace.setting import Setting
from lean_finetune.step.batches import BatchShape
from tests.kit.specs import changed, llama, train_of

GPU, TOKENS = "H100", 4096
BYTES_PER_SECOND = 3.35e12
"""Of an H100 SXM, by its data sheet."""
SIZES: Mapping[str, Mapping[str, Any]] = {
    "8B": {"hidden": 4096, "intermediate": 14336, "layers": 32, "heads": 32, "kv_heads": 8, "vocabulary": 128256},
    "32B": {
        "hidden": 5120,
        "intermediate": 25600,
        "layers": 64,
        "heads": 64,
        "kv_heads": 8,
        "vocabulary": 151936,
        "head_dim": 128,
    },
    "70B": {"hidden": 8192, "intermediate": 28672, "layers": 80, "heads": 64, "kv_heads": 8, "vocabulary": 128256},
}
"""Llama 3.1 8B and 70B, Qwen3 32B."""
CODE: Mapping[str, Mapping[str, Any]] = {
    "plain": {"lora_joined": "none", "fused_norms": "none", "fused_kernels": "none"},
    "now": {"fused_kernels": "none"},
    "with kernels": {"fused_kernels": "auto"},
}
"""peft's and transformers' own code; the defaults; and train.fused_kernels=auto."""
STEPS = (("lora", False), ("lora", True), ("qlora", False), ("qlora", True), ("full", True))
"""Methods, without and with checkpointing."""
BARS: Mapping[tuple[str, bool, str], tuple[int, int]] = {
    ("lora", False, "now"): (45, 75),
    ("lora", False, "with kernels"): (28, 52),
    ("qlora", True, "now"): (50, 120),
}
"""Most operations of a layer, in forward and in backward."""
SHAPE = BatchShape(rows=1, length=TOKENS, supervised=TOKENS - 1, packed_lengths=None)


class CountingTrace(MemoryTrace):
    """Counts launched operations, and the bytes that those beside products move, by phase."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.launches: Counter[str] = Counter()
        self.moved_bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Mapping | None = None) -> Any:
        """See the base class. An operation that is expanded counts by its parts."""
        given = _storages((args, kwargs))
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if out is NotImplemented or func in self._rules.expansions or func.namespace == "prim" or "empty" in str(func):
            return out
        made = _storages(out)
        if func._schema.is_mutable or made.keys() - given.keys():
            phase = self._phase or ""
            self.launches[phase] += 1
            if not any(name in str(func) for name in ("mm", "attention", "bmm", "linear")):
                self.moved_bytes[phase] += sum({**given, **made}.values())
        return out


def _storages(values: Any) -> dict[int, int]:
    """By storage, the bytes of the tensors on it that are read or written."""
    found: dict[int, int] = {}
    for value in tree_iter(values):
        if isinstance(value, torch.Tensor):
            place = value.untyped_storage()._cdata
            found[place] = max(found.get(place, 0), value.numel() * value.element_size())
    return found


def _name(method: str, grad_ckpt: bool, code: str) -> str:
    return f"{method}{', checkpointing' if grad_ckpt else ''}: {code}"


def _setting(method: Any, grad_ckpt: bool, code: str) -> Setting:
    train = train_of(
        method, rank=16, grad_ckpt=grad_ckpt, loss_chunk=512, optimizer="adamw_8bit" if method == "full" else "adamw"
    )
    return Setting(train=changed(train, **CODE[code]))


def _of_layer(method: str, grad_ckpt: bool, code: str) -> Row:
    """Launches, saved bytes and traffic of one layer."""
    target, traces = target_of(resolve_gpu(GPU)[0]), []
    for layers in (2, 3):
        config = llama(**{**SIZES["8B"], "layers": layers})
        model = TracedModel(config, _setting(method, grad_ckpt, code), target)
        traces.append(trace_steps(CountingTrace, model, ((SHAPE,),))[0])
    less, more = traces

    def grown(name: str, phase: str) -> int:
        return getattr(more, name)[phase] - getattr(less, name)[phase]

    saved = [trace.peaks()["forward"].by_category[ACTIVATIONS] for trace in traces]
    moved = sum(grown("moved_bytes", phase) for phase in ("forward", "backward"))
    return {
        "name": _name(method, grad_ckpt, code),
        "forward": grown("launches", "forward"),
        "backward": grown("launches", "backward"),
        "saved_bytes": saved[1] - saved[0],
        "traffic_ms": 1000 * moved / BYTES_PER_SECOND,
    }


def _peak(size: str, method: str, grad_ckpt: bool, code: str) -> int:
    target = target_of(resolve_gpu(GPU)[0])
    model = TracedModel(llama(**SIZES[size]), _setting(method, grad_ckpt, code), target)
    return predict(model, ((SHAPE, SHAPE),)).peak.bytes


def measure(quick: bool) -> Measured:
    """Count layers, and predict the peaks of three sizes; with `quick` only the layers that have bars."""
    torch.set_num_threads(1)
    rows: dict[tuple[str, bool, str], Row] = {}
    sizes = () if quick else tuple(SIZES)
    for method, grad_ckpt in STEPS:
        for code in CODE:
            if not quick or (method, grad_ckpt, code) in BARS:
                peaks = {f"{size}_peak_bytes": _peak(size, method, grad_ckpt, code) for size in sizes}
                rows[method, grad_ckpt, code] = {**_of_layer(method, grad_ckpt, code), **peaks}
    bars = [
        at_most(f"{rows[step]['name']}: launches of a layer in {phase}", rows[step][phase], limit)
        for step, limits in BARS.items()
        for phase, limit in zip(("forward", "backward"), limits, strict=True)
    ]
    return Measured(rows=[*rows.values()], bars=bars)


if __name__ == "__main__":
    benchmark("launches", measure)()
