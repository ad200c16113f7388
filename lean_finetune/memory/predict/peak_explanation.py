"""Why the peak is as high as it is: what is held at that instant and what made it, and the way up to it."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PretrainedConfig

from lean_finetune.core.units import GIB
from lean_finetune.memory.predict.peak import Setting, trace_steps
from lean_finetune.memory.predict.state_formulas import host_lines, model_shapes, paged_lines, state_lines
from lean_finetune.memory.predict.traced_shapes import TracedSteps
from lean_finetune.memory.trace.allocation_origins import OriginTrace
from lean_finetune.memory.trace.cached_fake_mode import QuickFakeMode
from lean_finetune.memory.trace.cuda_kernels import Target
from lean_finetune.memory.trace.memory_trace import CATEGORIES, OPTIMIZER

MOST_HOLDINGS = 10
TIMELINE_POINTS = 400
"""Instants of the timeline: as many as a plot can show."""
TIMELINE_COLUMNS = ("event", "phase", *CATEGORIES)
BETWEEN = "between"
"""Phase of what happens between two phases: a micro-batch is made, a loss is freed."""


@dataclass(frozen=True, kw_only=True)
class Holding:
    """Storages of one kind held at the peak: alike but for the layer they belong to."""

    category: str
    operation: str
    """What made them; `held` for what existed before the first step."""
    module: str
    """Path of the module they were made for, with * for a layer's number."""
    phase: str
    shape: tuple[int, ...] | None
    dtype: str | None
    count: int
    bytes: int

    def as_json(self) -> dict[str, Any]:
        """An entry of breakdown.json."""
        return {
            "category": self.category,
            "operation": self.operation,
            "module": self.module,
            "phase": self.phase,
            "shape": None if self.shape is None else list(self.shape),
            "dtype": self.dtype,
            "count": self.count,
            "bytes": self.bytes,
        }


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The peak taken apart."""

    peak_bytes: int
    phase: str
    top: tuple[Holding, ...]
    """The largest kinds of storages at the peak instant."""
    timeline: Sequence[Mapping[str, Any]]
    """Bytes by category at instants of the worst step, in their order: `TIMELINE_COLUMNS`, in GiB."""

    def as_json(self) -> dict[str, Any]:
        """Its part of explanation.json."""
        return {
            "peak_bytes": self.peak_bytes,
            "phase": self.phase,
            "top": [holding.as_json() for holding in self.top],
        }


def trace_origins(config: PretrainedConfig, setting: Setting, steps: TracedSteps, target: Target) -> OriginTrace:
    """Trace steps, remembering where every storage came from.

    The setting has been predicted before, so what cannot be traced was refused there.
    """
    trace = OriginTrace(
        granularity_bytes=target.granularity_bytes,
        rules=target.rules,
        vocab_size=config.get_text_config().vocab_size,
    )
    with QuickFakeMode(), target.attention():
        trace_steps(trace, config, setting, steps, target)
    return trace


def explain(trace: OriginTrace) -> Explanation:
    """Take the highest instant of a trace apart, and draw the way up to it."""
    changes = np.array([change for _, change in trace.events])
    starts, phases = _phases(trace)
    held = np.cumsum(changes)
    # Of phases alone: between two only the inputs grow, and the next phase begins with them.
    inside = phases != BETWEEN
    peak = int(np.argmax(np.where(inside, held, -1)))
    return Explanation(
        peak_bytes=int(held[peak]),
        phase=str(phases[peak]),
        top=_largest(trace, peak),
        timeline=_timeline(trace, changes, phases, starts),
    )


def _phases(trace: OriginTrace) -> tuple[int, np.ndarray]:
    """The first event of the first step, and the phase of every event."""
    start = trace.micro_batches[0][0]
    phases = np.full(len(trace.events), BETWEEN, dtype="U16")
    for first, end, name in trace.phases:
        phases[first:end] = name
    return start, phases


def _largest(trace: OriginTrace, last: int) -> tuple[Holding, ...]:
    """The kinds of storages that hold most after event `last`."""
    live: dict[int, int] = {}
    for storage, change in trace.events[: last + 1]:
        if change > 0:
            live[storage] = change
        else:
            del live[storage]
    sizes: Counter[tuple] = Counter()
    counts: Counter[tuple] = Counter()
    for storage, size in live.items():
        origin = trace.origins[storage]
        module = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", origin.module)
        kind = (trace.category(storage), origin.operation, module, origin.phase, origin.shape, origin.dtype)
        sizes[kind] += size
        counts[kind] += 1
    return largest_holdings((kind, counts[kind], size) for kind, size in sizes.items())


def largest_holdings(kinds: Iterable[tuple[tuple, int, int]]) -> tuple[Holding, ...]:
    """The largest of kinds of storages, each with how many there are and their bytes.

    A kind is category, operation, module, phase, shape and type; one that stands there twice is added up.
    """
    totals: dict[tuple, tuple[int, int]] = {}
    for kind, count, size in kinds:
        before = totals.get(kind, (0, 0))
        totals[kind] = before[0] + count, before[1] + size
    largest = sorted(totals.items(), key=lambda item: (-item[1][1], str(item[0])))[:MOST_HOLDINGS]
    names = ("category", "operation", "module", "phase", "shape", "dtype")
    return tuple(
        Holding(**dict(zip(names, kind, strict=True)), count=count, bytes=size) for kind, (count, size) in largest
    )


def _timeline(trace: OriginTrace, changes: np.ndarray, phases: np.ndarray, start: int) -> list[Mapping[str, Any]]:
    """Bytes by category at the highest instant of each of `TIMELINE_POINTS` stretches of the steps."""
    places = {category: place for place, category in enumerate(CATEGORIES)}
    category = np.array([places[trace.category(storage)] for storage, _ in trace.events])
    held_CE = np.zeros((len(CATEGORIES), len(changes)), dtype=np.int64)
    held_CE[category, np.arange(len(changes))] = changes
    held_CE = held_CE.cumsum(axis=1)
    total = held_CE.sum(axis=0)
    edges = np.unique(np.linspace(start, len(changes), TIMELINE_POINTS + 1).astype(int))
    rows: list[Mapping[str, Any]] = []
    for first, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        event = first + int(np.argmax(total[first:end]))
        sizes = dict(zip(CATEGORIES, held_CE[:, event].tolist(), strict=True))
        rows.append(timeline_row(event - start, str(phases[event]), sizes))
    return rows


def timeline_row(event: int, phase: str, sizes: Mapping[str, int]) -> Mapping[str, Any]:
    """A row of the timeline, from bytes by category."""
    held = {category: round(sizes.get(category, 0) / GIB, 6) for category in CATEGORIES}
    return {"event": event, "phase": phase, **held}


def closed_form(config: PretrainedConfig, setting: Setting, target: Target) -> Iterator[dict[str, Any]]:
    """What stays on a GPU from step to step, by arithmetic alone: category, why, bytes; managed or host memory is last.

    Of what GPUs divide, each tensor counts with an equal part: rows that do not divide evenly are left out of account.
    """
    shapes, spec, optimizer = model_shapes(config), setting.model, setting.optimizer
    cuda, masters = target.foreach, setting.master_weights
    held = state_lines(
        shapes,
        spec,
        optimizer,
        cuda=cuda,
        master_weights=masters,
        offload=setting.offload,
        optimizer_in_backward=setting.optimizer_in_backward,
    )
    if setting.offload == "none":
        apart = paged_lines(shapes, spec, optimizer, cuda=cuda, master_weights=masters)
    else:
        apart = host_lines(shapes, spec, optimizer, master_weights=masters, offload=setting.offload)
    for line in (*held, *apart):
        category = OPTIMIZER if line in apart else line.category
        parts = setting.sharing.holders_of(category) if setting.sharing and line.divides else 1
        why = line.what if parts == 1 else f"{line.what}, divided among {parts} GPUs"
        size = line.total_bytes(target.granularity_bytes, parts)
        yield {"category": line.category, "why": why, "tensors": len(line.tensor_bytes), "bytes": size}


def host_state_bytes(config: PretrainedConfig, setting: Setting) -> int:
    """What train.offload takes of the host's memory in one process, in blocks as they are asked for."""
    if setting.offload == "none":
        return 0
    masters, offload = setting.master_weights, setting.offload
    lines = host_lines(model_shapes(config), setting.model, setting.optimizer, master_weights=masters, offload=offload)
    holders = 1 if setting.sharing is None else setting.sharing.holders_of(OPTIMIZER)
    return sum(line.total_bytes(1, holders) for line in lines)
