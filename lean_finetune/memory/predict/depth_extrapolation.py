"""The peaks of a deep model from traces of shallow ones, exactly.

Where layers are alike, one more of them adds the same bytes to every instant of one and the same *window*: the stretch
of a phase in which one layer is at work. (In forward, the layers below have kept their activations; in backward, those
above have left their gradients; nothing else depends on depth.) So the instant at which a window is fullest stays the
same, and what lives then grows by the same tensors with every layer: their number by size is a straight line in depth.
The few tensors that list something of every layer (the norms that clipping stacks) grow in size instead, by the same
step each. Windows are kept apart for the first layers, the last ones, and whatever runs outside of any layer; layers in
the middle lie on a line between those, so none of them is fuller than both its ends. Where no layer has been at work
(norms and update, of lists of all tensors) so are instants inside operations: what these take for themselves grows by
other steps than lists do, and a few layers may turn the scale.

Three depths are traced: two make the line and the third must lie on it, for every window and every size.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.autograd import _get_sequence_nr

from lean_finetune.memory.predict.layer_structure import Repetition, decoder_layers
from lean_finetune.memory.trace.memory_trace import WORKSPACE, MemoryTrace, OpRules, Peak
from lean_finetune.step.batches import BatchShape
from lean_finetune.step.loss import causal_lm

BEFORE, AFTER = -1, -2
"""In place of a layer's number: no layer is at work, and none or some have been in this phase. Layers come between."""
INSIDE = -3
"""In place of BEFORE at instants inside an operation, with the memory that it takes for itself."""
NO_SEQUENCE = 2**64 - 1
"""What PyTorch gives nodes that stand for no forward operation: those that add up gradients."""

Label = tuple[Any, ...]
"""What tells tensors of a size apart; their category comes first."""
Contents = Counter[tuple[Label, int]]
"""Live tensors by label and bytes, before the allocator rounds them."""
Place = tuple[int, str, int]
"""Which phase of the run, in order; from which end of the model, the layer counted from there."""


class NotRepeated(Exception):
    """The traced depths do not lie on a line."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """A stretch of the trace at its fullest."""

    phase: str
    micro_batch: int
    """Number of the micro-batch that was last begun, over all steps; -1 before the first."""
    contents: Contents


class WindowTrace(MemoryTrace):
    """Follows storages and keeps the peak of every window."""

    def __init__(self, *, granularity_bytes: int, rules: OpRules, vocab_size: int):
        """Start with nothing held; see MemoryTrace."""
        super().__init__(granularity_bytes=granularity_bytes, rules=rules, vocab_size=vocab_size)
        self._visits: list[str] = []
        self._micro_batch = -1
        self._at_work: int | None = None
        self._outside, self._layer_before = BEFORE, BEFORE
        # The stretches of autograd's numbers that each layer's forward passes took.
        self._made: list[tuple[int, int, int]] = []
        # The fullest instant of each window: bytes, number of events, micro-batch.
        self._fullest: dict[tuple[int, int], tuple[int, int, int]] = {}
        self._raw_bytes: list[int] = []
        self._inside = False

    def begin_run(self, model: nn.Module) -> None:
        """Watch from now on which of the model's layers is at work."""
        super().begin_run(model)
        layers = decoder_layers(causal_lm(model))
        assert layers is not None  # find_repetition saw them.
        for number, layer in enumerate(layers):
            self._follow(number, layer)

    def _follow(self, number: int, layer: nn.Module) -> None:
        """Note when a layer's forward pass begins and ends: the first one, and that which checkpointing runs again."""
        begun: list[int] = []

        def starts(module: nn.Module, args: object) -> None:
            begun.append(_get_sequence_nr())
            self._at_work, self._outside = number, AFTER

        def ends(module: nn.Module, args: object, output: object) -> None:
            self._made.append((begun.pop(), _get_sequence_nr(), number))
            self._at_work = None

        layer.register_forward_pre_hook(starts)
        layer.register_forward_hook(ends, always_call=True)

    def begin_micro_batch(self, shape: BatchShape) -> None:
        """Count it."""
        super().begin_micro_batch(shape)
        self._micro_batch += 1

    def phase(self, name: str) -> Any:
        """Name what happens inside."""
        self._visits.append(name)
        self._outside, self._layer_before = BEFORE, BEFORE
        return super().phase(name)

    def _add(self, count: int, category: str) -> int:
        self._raw_bytes.append(count)
        self._inside = category == WORKSPACE
        try:
            return super()._add(count, category)
        finally:
            self._inside = False

    def _note_peak(self) -> None:
        super()._note_peak()
        if self._phase is None:
            return
        layer = self._layer()
        window = (len(self._visits) - 1, INSIDE if self._inside and layer == BEFORE else layer)
        if self.current_bytes > self._fullest.get(window, (-1, 0, 0))[0]:
            self._fullest[window] = (self.current_bytes, len(self._events), self._micro_batch)

    def _layer(self) -> int:
        """The layer at work."""
        if self._at_work is not None:
            return self._at_work
        node = torch._C._current_autograd_node() if self._phase == "backward" else None
        number = NO_SEQUENCE if node is None else node._sequence_nr()
        if number == NO_SEQUENCE:  # In backward, a gradient is added up for the layer whose node ran before.
            return self._outside if node is None else self._layer_before
        self._layer_before = self._made_in(number)
        return self._layer_before

    def _made_in(self, number: int) -> int:
        """The layer whose forward pass made a node of backward."""
        for start, end, layer in reversed(self._made):
            if number >= end:
                break
            if number >= start:
                self._outside = AFTER
                return layer
        return self._outside

    def label(self, storage_id: int) -> Label:
        """What a storage is told apart by."""
        return (self._categories[storage_id],)

    def windows(self) -> dict[tuple[int, int], Window]:
        """Every window by (phase of the run, layer), in the order in which they began."""
        wanted: dict[int, list[tuple[int, int]]] = {}
        for key, (_, place, _) in self._fullest.items():
            wanted.setdefault(place, []).append(key)
        contents: dict[tuple[int, int], Contents] = {}
        live: Contents = Counter()
        for place in range(len(self._events) + 1):
            for key in wanted.get(place, ()):
                contents[key] = +live
            if place < len(self._events):
                storage, change = self._events[place]
                live[self.label(storage), self._raw_bytes[storage]] += 1 if change > 0 else -1
        return {
            key: Window(phase=self._visits[key[0]], micro_batch=micro_batch, contents=contents[key])
            for key, (_, _, micro_batch) in self._fullest.items()
        }


@dataclass(frozen=True, kw_only=True)
class DeepPeaks:
    """What a deep model's phases hold at their fullest."""

    by_phase: Mapping[str, Peak]
    micro_batch: int
    """Number, over all steps, of the one in whose forward or backward the most is held."""


def deep_windows(traces: Sequence[WindowTrace], repetition: Repetition, granularity_bytes: int) -> dict[Place, Window]:
    """The windows near both ends of the model of `repetition.layers` layers, from traces at `repetition.depths`.

    Raises:
        NotRepeated: the depths contradict each other.
    """
    found = [trace.windows() for trace in traces]
    _check_middle(found[-1], repetition, granularity_bytes)
    placed = [
        dict(_placed(windows, depth, repetition.period))
        for windows, depth in zip(found, repetition.depths, strict=True)
    ]
    if any(windows.keys() != placed[-1].keys() for windows in placed):
        raise NotRepeated("a phase runs in some depths alone")
    more = (repetition.layers - repetition.depths[-1]) // repetition.period
    return {
        place: replace(window, contents=_extended([windows[place].contents for windows in placed], more))
        for place, window in placed[-1].items()
    }


def deep_peaks(windows: Mapping[Place, Window], granularity_bytes: int) -> DeepPeaks:
    """The peaks of a deep model's phases."""
    by_phase: dict[str, Peak] = {}
    fullest, micro_batch = -1, 0
    for window in windows.values():
        peak = peak_of(window.contents, granularity_bytes)
        if window.phase not in by_phase or peak.bytes > by_phase[window.phase].bytes:
            by_phase[window.phase] = peak
        if window.phase in ("forward", "backward") and peak.bytes > fullest:
            fullest, micro_batch = peak.bytes, window.micro_batch
    return DeepPeaks(by_phase=by_phase, micro_batch=micro_batch)


def _placed(windows: Mapping[tuple[int, int], Window], depth: int, period: int) -> Iterator[tuple[Place, Window]]:
    """Windows by place: a layer near both ends of a shallow model stands for two."""
    for (visit, layer), window in windows.items():
        if layer in (BEFORE, AFTER, INSIDE):
            yield (visit, "outside", layer), window
        elif layer <= period:
            yield (visit, "first", layer), window
        if layer >= depth - 1 - period:
            yield (visit, "last", depth - 1 - layer), window


def _check_middle(windows: Mapping[tuple[int, int], Window], repetition: Repetition, granularity_bytes: int) -> None:
    """Between the first layer and the last one, windows must lie on a line by layer.

    Raises:
        NotRepeated: they do not.
    """
    period, depth = repetition.period, repetition.depths[-1]
    sizes = {key: peak_of(window.contents, granularity_bytes).bytes for key, window in windows.items()}
    for visit, layer in windows:
        series = [sizes.get((visit, layer + k * period)) for k in range(3)]
        if layer < 1 or layer + 2 * period > depth - 2:
            continue
        low, middle, high = series
        if low is None or middle is None or high is None or middle - low != high - middle:
            raise NotRepeated(f"layers {layer} to {layer + 2 * period} hold {series} bytes")


def _extended(depths: Sequence[Contents], more: int) -> Contents:
    """What lives `more` steps of depth beyond the last of three.

    Raises:
        NotRepeated: neither the number of tensors of a size nor the sizes themselves lie on a line.
    """
    first, second, third = depths
    result: Contents = Counter()
    grown: list[Contents] = [Counter(), Counter(), Counter()]
    for key in {**first, **second, **third}:
        if third[key] - second[key] == second[key] - first[key]:
            result[key] = third[key] + (third[key] - second[key]) * more
        else:
            for left, contents in zip(grown, depths, strict=True):
                left[key] = contents[key]
    lists = [sorted(left.elements(), key=_by_category) for left in grown]
    if len({len(sizes) for sizes in lists}) > 1:
        raise NotRepeated("tensors of a size come and go with depth")
    for (label, low), (_, middle), (other, high) in zip(*lists, strict=True):
        if label[0] != other[0] or middle - low != high - middle:
            raise NotRepeated(f"tensors of {label[0]} have {low}, {middle}, {high} bytes")
        # What grows with depth has another shape at every depth: none of them is this one's.
        label = tuple(one if one == another else None for one, another in zip(label, other, strict=True))
        result[label, high + (high - middle) * more] += 1
    if any(count < 0 for count in result.values()):
        raise NotRepeated("fewer tensors with more layers")
    return result


def _by_category(tensor: tuple[Label, int]) -> tuple[str, int, str]:
    """Order in which tensors of several depths are held against each other."""
    label, size = tensor
    return label[0], size, str(label)


def peak_of(contents: Contents, granularity_bytes: int) -> Peak:
    """Bytes of live tensors, each rounded up as the allocator does."""
    by_category: Counter[str] = Counter()
    for ((category, *_), size), count in contents.items():
        by_category[category] += count * (-(-size // granularity_bytes) * granularity_bytes)
    held = {category: size for category, size in sorted(by_category.items()) if size}
    return Peak(bytes=sum(held.values()), by_category=held)
