"""Predict a deep model from shallow ones: memory is linear in depth.

A *window* is the part of a phase in which one layer runs. If layers are alike, one more layer adds the same bytes to
every instant of a window: in forward, lower layers have saved their activations; in backward, upper layers have left
their gradients; nothing else depends on depth. So the highest instant of a window stays the same, and the number of
live tensors of each size is linear in depth. A few tensors list something of every layer (the norms that clipping
stacks); their size is linear instead.

There are windows for the first layers, for the last ones, and for operations outside of any layer. Layers in the
middle are linear between those two ends, so none exceeds both. Outside of layers (norms and update) instants inside
operations have a window of their own, because temporary memory grows differently from lists of tensors.

Where the first layers alone are recomputed, each of the two parts of the layers has such ends, and memory is linear in
the depth of each. The first trace has no more layers than needed, one more for each part gives its line, and the last
one, in which every part is deeper, must lie on all lines, for every window and every size.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.autograd import _get_sequence_nr

from lean_finetune.memory.predict.layer_repetition import Repetition
from lean_finetune.memory.trace.memory_trace import WORKSPACE, MemoryTrace, Peak, Workspace
from lean_finetune.memory.trace.origin_trace import NO_SEQUENCE
from lean_finetune.model.empty_model import decoder_layers
from lean_finetune.step.batches import BatchShape
from lean_finetune.step.loss import causal_lm
from lean_finetune.step.parallel_model import OtherStage

BEFORE, AFTER = -1, -2
"""Layer numbers of operations outside of any layer: before the first layer of the phase, and after."""
INSIDE = -3
"""As BEFORE, at instants inside an operation that allocates temporary memory."""
Label = tuple[Any, ...]
"""Distinguishes tensors of the same size; the category comes first."""
Contents = Counter[tuple[Label, int]]
"""Number of live tensors by label and bytes, before the allocator's rounding."""
WindowKey = tuple[int, str, int]
"""Index of the phase in the run; end of the model; layer counted from that end."""


class NotRepeated(Exception):
    """Memory is not linear in the traced depths."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """The highest instant of a window."""

    phase: str
    micro_batch: int
    """Number of the latest micro-batch over all steps; -1 before the first."""
    contents: Contents


class WindowTrace(MemoryTrace):
    """Finds the highest instant of every window."""

    def __init__(self, **options: Any):
        """See MemoryTrace."""
        super().__init__(**options)
        self._visits: list[str] = []
        self._micro_batch = -1
        self._running_layer: int | None = None
        self._outside, self._layer_before = BEFORE, BEFORE
        # Ranges of autograd's sequence numbers of each layer's forward passes.
        self._sequence_ranges: list[tuple[int, int, int]] = []
        # Highest instant of each window: bytes, number of events, micro-batch.
        self._fullest: dict[tuple[int, int], tuple[int, int, int]] = {}
        self._inside = False
        self._of_operation: set[int] = set()
        """Temporary blocks of the operation that runs."""
        self._windows: dict[tuple[int, int], Window] | None = None
        self._layer_now = BEFORE
        self.places: list[tuple[int, int, int]] = []
        """Where another layer begins to allocate: number of events before, index of the phase, layer."""

    def begin_steps(self, model: nn.Module) -> None:
        """Track which of the model's layers runs."""
        super().begin_steps(model)
        layers = decoder_layers(causal_lm(model))
        assert layers is not None  # Checked by find_repetition.
        for number, layer in enumerate(layer for layer in layers if not isinstance(layer, OtherStage)):
            self._track(number, layer)

    def _track(self, number: int, layer: nn.Module) -> None:
        """Record the beginning and end of a layer's forward pass, also of its recomputation by checkpointing."""
        starts: list[int] = []

        def before_forward(module: nn.Module, args: object) -> None:
            starts.append(_get_sequence_nr())
            self._running_layer, self._outside = number, AFTER

        def after_forward(module: nn.Module, args: object, output: object) -> None:
            self._sequence_ranges.append((starts.pop(), _get_sequence_nr(), number))
            self._running_layer = None

        layer.register_forward_pre_hook(before_forward)
        layer.register_forward_hook(after_forward, always_call=True)

    def begin_micro_batch(self, shape: BatchShape) -> None:
        """See MemoryTrace."""
        super().begin_micro_batch(shape)
        self._micro_batch += 1

    def phase(self, name: str) -> Any:
        """See MemoryTrace."""
        self._visits.append(name)
        self._outside, self._layer_before = BEFORE, BEFORE
        return super().phase(name)

    def _workspace_blocks(self, rules: Mapping[Any, Workspace], func: Any, args: tuple, kwargs: Mapping) -> list[int]:
        blocks = super()._workspace_blocks(rules, func, args, kwargs)
        self._of_operation.update(blocks)
        return blocks

    def _remove(self, storage_id: int) -> None:
        self._of_operation.discard(storage_id)
        super()._remove(storage_id)

    def _add(self, count: int, category: str) -> int:
        # A result is allocated inside of its operation, too, if a temporary block was before it.
        self._inside = category == WORKSPACE or bool(self._of_operation)
        event, storage_id = len(self._events), super()._add(count, category)
        self._inside = False
        if self._phase is not None:
            place = len(self._visits) - 1, self._layer_now
            if not self.places or self.places[-1][1:] != place:
                self.places.append((event, *place))
        return storage_id

    def _update_peak(self) -> None:
        super()._update_peak()
        if self._phase is None:
            return
        layer = self._layer_now = self._layer()
        window = (len(self._visits) - 1, INSIDE if self._inside and layer == BEFORE else layer)
        if self.current_bytes > self._fullest.get(window, (-1, 0, 0))[0]:
            self._fullest[window] = (self.current_bytes, len(self._events), self._micro_batch)

    def _layer(self) -> int:
        """The running layer."""
        if self._running_layer is not None:
            return self._running_layer
        node = torch._C._current_autograd_node() if self._phase == "backward" else None
        number = NO_SEQUENCE if node is None else node._sequence_nr()
        if number == NO_SEQUENCE:  # A gradient is accumulated for the layer whose node ran before.
            return self._outside if node is None else self._layer_before
        self._layer_before = self._layer_of(number)
        return self._layer_before

    def _layer_of(self, number: int) -> int:
        """The layer whose forward pass created an autograd node."""
        for start, end, layer in reversed(self._sequence_ranges):
            if number >= end:
                break
            if number >= start:
                self._outside = AFTER
                return layer
        return self._outside

    def layer_spans(self, visit: int) -> list[tuple[int, int, int]]:
        """First event, end and layer of those that run in a phase, in order; none if no layer runs.

        What runs between two layers belongs to the first one.

        Raises:
            NotRepeated: layers do not run one after the other.
        """
        _, end, _ = self.phases[visit]
        places = [(event, layer) for event, number, layer in self.places if number == visit]
        inside = [place for place, (_, layer) in enumerate(places) if layer >= 0]
        if not inside:
            return []
        run: list[tuple[int, int]] = []
        for event, layer in places[inside[0] : inside[-1] + 1]:
            if layer >= 0 and (not run or run[-1][1] != layer):
                run.append((event, layer))
        after = places[inside[-1] + 1][0] if inside[-1] + 1 < len(places) else end
        order = [layer for _, layer in run]
        upward = sorted(order)
        if upward != list(range(len(order))) or order not in (upward, upward[::-1]):
            raise NotRepeated("layers do not run one after the other")
        ends = [*(event for event, _ in run[1:]), after]
        return [(event, end, layer) for (event, layer), end in zip(run, ends, strict=True)]

    def label(self, storage_id: int) -> Label:
        """How a storage is distinguished from others of its size."""
        return (self._categories[storage_id],)

    def windows(self) -> dict[tuple[int, int], Window]:
        """Windows by (index of the phase, layer), in the order of the run, once it has ended."""
        if self._windows is None:
            self._windows = self._find_windows()
        return self._windows

    def _find_windows(self) -> dict[tuple[int, int], Window]:
        contents: dict[tuple[int, int], Contents] = {}
        live: Contents = Counter()
        done = 0
        for key, (_, end, _) in sorted(self._fullest.items(), key=lambda item: item[1][1]):
            for storage, change in self._events[done:end]:
                live[self.label(storage), self.exact_bytes[storage]] += 1 if change > 0 else -1
            contents[key], done = +live, end
        return {
            key: Window(phase=self._visits[key[0]], micro_batch=micro_batch, contents=contents[key])
            for key, (_, _, micro_batch) in self._fullest.items()
        }


def deep_windows(
    traces: Sequence[WindowTrace], repetition: Repetition, granularity_bytes: int
) -> dict[WindowKey, Window]:
    """Extrapolate the windows near both ends of each part of a deep model's layers.

    `traces` have the numbers of layers in `repetition.traced`.

    Raises:
        NotRepeated: memory is not linear in depth.
    """
    found = [trace.windows() for trace in traces]
    _check_middle(found[-1], repetition, granularity_bytes)
    depths = zip(found, repetition.traced, strict=True)
    placed = [dict(_placed(windows, parts, repetition)) for windows, parts in depths]
    if any(windows.keys() != placed[-1].keys() for windows in placed):
        raise NotRepeated("a phase runs in some depths alone")
    return {
        place: replace(window, contents=_extended([windows[place].contents for windows in placed], repetition.more))
        for place, window in placed[-1].items()
    }


def deep_peaks(windows: Mapping[WindowKey, Window], granularity_bytes: int) -> tuple[dict[str, Peak], int]:
    """Peaks of a deep model's phases; and the number of the micro-batch with the highest forward or backward peak."""
    by_phase: dict[str, Peak] = {}
    fullest, micro_batch = -1, 0
    for window in windows.values():
        peak = peak_of_contents(window.contents, granularity_bytes)
        if window.phase not in by_phase or peak.bytes > by_phase[window.phase].bytes:
            by_phase[window.phase] = peak
        if window.phase in ("forward", "backward") and peak.bytes > fullest:
            fullest, micro_batch = peak.bytes, window.micro_batch
    return by_phase, micro_batch


def offloaded_bytes(traces: Sequence[MemoryTrace], repetition: Repetition) -> int:
    """Peak of offloaded bytes in a deep model, from traces with the numbers of layers in `repetition.traced`.

    Raises:
        NotRepeated: they are not linear in depth.
    """
    sizes = [trace.offloaded_peak_bytes for trace in traces]
    extended = _line(sizes, repetition.more)
    if extended is None:
        raise NotRepeated(f"{', '.join(map(str, sizes))} bytes are offloaded")
    return extended


def _line(values: Sequence[int], more: Sequence[int]) -> int | None:
    """The value of a deep model from those of shallow ones; None if it is not linear in depth.

    `values` are of the shallowest model, of one that is deeper in each part, and of one that is twice as much deeper in
    all parts; the deep model is `more` times as much deeper in each.
    """
    first, *deeper, last = values
    slopes = [value - first for value in deeper]
    if last - first != 2 * sum(slopes):
        return None
    return first + sum(slope * times for slope, times in zip(slopes, more, strict=True))


def _placed(
    windows: Mapping[tuple[int, int], Window], parts: Sequence[int], repetition: Repetition
) -> Iterator[tuple[WindowKey, Window]]:
    """Windows by place; a layer near both ends of a shallow part has two places."""
    places = [(n, layer, count) for n, count in enumerate(parts) for layer in range(count)]
    for (visit, number), window in windows.items():
        if number in (BEFORE, AFTER, INSIDE):
            yield (visit, "outside", number), window
            continue
        part, layer, count = places[number]
        of_part = f" of part {part}" if len(parts) > 1 else ""
        deepened = part in repetition.deepened
        if layer <= repetition.period or not deepened:
            yield (visit, f"first{of_part}", layer), window
        if layer >= count - 1 - repetition.period and deepened:
            yield (visit, f"last{of_part}", count - 1 - layer), window


def _check_middle(windows: Mapping[tuple[int, int], Window], repetition: Repetition, granularity_bytes: int) -> None:
    """Check that windows between the first and the last layer of a part are linear in the layer's number.

    Raises:
        NotRepeated: they are not.
    """
    period, parts = repetition.period, repetition.traced[-1]
    starts = [sum(parts[:n]) for n in range(len(parts))]
    middle_layers = {
        layer for n in repetition.deepened for layer in range(starts[n] + 1, starts[n] + parts[n] - 1 - 2 * period)
    }
    sizes = {key: peak_of_contents(window.contents, granularity_bytes).bytes for key, window in windows.items()}
    for visit, layer in windows:
        if layer not in middle_layers:
            continue
        series = low, middle, high = [sizes.get((visit, layer + k * period)) for k in range(3)]
        if low is None or middle is None or high is None or middle - low != high - middle:
            raise NotRepeated(f"layers {layer} to {layer + 2 * period} hold {series} bytes")


def _extended(depths: Sequence[Contents], more: Sequence[int]) -> Contents:
    """Contents of a window of a deep model, from those of shallow ones (see `_line`).

    Raises:
        NotRepeated: neither the number of tensors of a size nor the sizes are linear in depth.
    """
    result: Contents = Counter()
    grown: list[Contents] = [Counter() for _ in depths]
    for key in {key: None for contents in depths for key in contents}:
        counts = [contents[key] for contents in depths]
        count = _line(counts, more)
        if count is not None:
            result[key] = count
            continue
        for left, number in zip(grown, counts, strict=True):
            left[key] = number
    # Tensors of several depths are matched by category, then size.
    lists = [sorted(left.elements(), key=lambda t: (t[0][0], t[1], str(t[0]))) for left in grown]
    if len({len(sizes) for sizes in lists}) > 1:
        raise NotRepeated("tensors of a size come and go with depth")
    for tensors in zip(*lists, strict=True):
        (label, _), (other, _) = tensors[0], tensors[-1]
        sizes = [size for _, size in tensors]
        size = _line(sizes, more)
        if label[0] != other[0] or size is None:
            raise NotRepeated(f"tensors of {label[0]} have {', '.join(map(str, sizes))} bytes")
        # A tensor that grows with depth has no known shape at this depth.
        label = tuple(one if one == another else None for one, another in zip(label, other, strict=True))
        result[label, size] += 1
    if any(count < 0 for count in result.values()):
        raise NotRepeated("fewer tensors with more layers")
    return result


def peak_of_contents(contents: Contents, granularity_bytes: int) -> Peak:
    """Bytes of live tensors, each rounded up by the allocator."""
    by_category: Counter[str] = Counter()
    for ((category, *_), size), count in contents.items():
        by_category[category] += count * (-(-size // granularity_bytes) * granularity_bytes)
    sizes = {category: size for category, size in sorted(by_category.items()) if size}
    return Peak(bytes=sum(sizes.values()), by_category=sizes)
