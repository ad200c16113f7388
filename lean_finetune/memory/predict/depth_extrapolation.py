"""Predict a deep model from shallow ones: how layers repeat, and memory as a line in depth."""

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import _get_sequence_nr
from transformers import PretrainedConfig

from lean_finetune.config.schema import Train
from lean_finetune.core.errors import UserError
from lean_finetune.memory.predict.traced_step import TracedModel
from lean_finetune.memory.trace.memory_trace import WORKSPACE, MemoryTrace, Peak, Workspace
from lean_finetune.memory.trace.origin_trace import NO_SEQUENCE
from lean_finetune.memory.trace.setting import Setting
from lean_finetune.model.empty_model import decoder_layers, meta_model
from lean_finetune.model.load_model import fake_model
from lean_finetune.step.batches import BatchShape
from lean_finetune.step.loss import causal_lm
from lean_finetune.step.parallel_model import OtherStage, fullest_owner, named_trained

Signature = tuple[Any, ...]
"""Structure of a layer: its modules, their parameters' shapes, and their plain attributes."""

DEPTHS = 3
"""Number of traced models: the fewest that can contradict a straight line."""

PeakOf = Callable[[int, int], int]
"""Predicted bytes of a stage of a pipeline with a number of layers."""


@dataclass(frozen=True, kw_only=True)
class Repetition:
    """How a model's layers repeat."""

    layers: int
    period: int
    """Layer k is like layer k - period, for every k from period on."""

    @property
    def depths(self) -> tuple[int, ...]:
        """Depths to trace; their last layers are of the same kinds as this model's.

        Each depth has a layer of every kind between its first and its last layer, and the deepest has three.
        """
        least = self.period + 2
        first = least + (self.layers - least) % self.period
        return tuple(first + self.period * number for number in range(DEPTHS))

    @property
    def pays(self) -> bool:
        """Whether fewer layers are traced than the model has."""
        return sum(self.depths) < self.layers


def find_repetition(
    config: PretrainedConfig, train: Train, all_layers_reason: str | None = None
) -> tuple[Repetition | None, str]:
    """How the layers of a model repeat, or None if all of them must be traced; and why.

    `all_layers_reason`: why all must be traced whatever the layers are.
    """
    count = config.get_text_config().num_hidden_layers
    everything = "the only layer" if count == 1 else f"all {count} layers"
    if all_layers_reason is not None:
        return None, f"{everything}: {all_layers_reason}"
    if train.grad_ckpt and train.grad_ckpt_layers is not None:
        return None, f"{everything}: the first {train.grad_ckpt_layers} alone are recomputed"
    if any("." in target for target in train.lora.targets) and train.method != "full":
        return None, f"{everything}: train.lora.targets names layers by path"
    if not Repetition(layers=count, period=1).pays:
        return None, f"{everything}: they are few"
    signatures = _signatures(config)
    if signatures is None or len(signatures) != count:
        return None, f"{everything}: the model has no single list of layers"
    alike = next((p for p in range(1, count) if signatures[p:] == signatures[:-p]), count)
    period = math.lcm(alike, train.recomputed_every if train.grad_ckpt else 1)
    repetition = Repetition(layers=count, period=period)
    if alike == count or not repetition.pays:
        return None, f"{everything}: they are not alike, or repeat too seldom"
    deepest = repetition.depths[-1]
    if _signatures(with_layers(config, deepest)) != signatures[:deepest]:
        return None, f"{everything}: a model with {deepest} has other layers"
    kinds = "are all alike" if period == 1 else f"repeat every {period}"
    return repetition, f"models of {', '.join(map(str, repetition.depths))} layers: its {count} {kinds}"


def with_layers(config: PretrainedConfig, count: int) -> PretrainedConfig:
    """The config of a model with the first `count` layers."""
    shallow = copy.deepcopy(config)
    text = shallow.get_text_config()
    layers = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if isinstance(value, list | tuple) and len(value) == layers:
            setattr(text, name, value[:count])
    text.num_hidden_layers = count
    return shallow


_known_signatures: dict[str, list[Signature] | None] = {}


def _signatures(config: PretrainedConfig) -> list[Signature] | None:
    """Signature of each layer, or None if the model has no list of layers. A search asks for few configs many times."""
    key = f"{type(config).__qualname__} {config.to_json_string(use_diff=False)}"
    if key not in _known_signatures:
        _known_signatures[key] = _find_signatures(config)
    return _known_signatures[key]


def _find_signatures(config: PretrainedConfig) -> list[Signature] | None:
    layers = decoder_layers(meta_model(config))
    if layers is None:
        return None
    described = [_describe(layer) for layer in layers]
    # An attribute that equals the layer's number wherever it exists is a position, not a difference.
    placed = {key: [(k, one[key]) for k, one in enumerate(described) if key in one] for one in described for key in one}
    numbers = {key for key, found in placed.items() if len(found) > 1 and all(k == value for k, value in found)}
    return [tuple(sorted((k, repr(v)) for k, v in values.items() if k not in numbers)) for values in described]


def _describe(layer: nn.Module) -> dict[str, Any]:
    """Class, parameters' shapes and plain attributes of every module of a layer, by path."""
    found: dict[str, Any] = {}
    for path, module in layer.named_modules():
        found[f"{path}:class"] = type(module).__qualname__
        for name, parameter in module.named_parameters(recurse=False):
            found[f"{path}:{name}"] = tuple(parameter.shape)
        for name, value in vars(module).items():
            if value is None or isinstance(value, bool | int | float | str):
                found[f"{path}.{name}"] = value
    return found


def for_fewer_layers(setting: Setting, config: PretrainedConfig) -> Setting:
    """The setting for traces of this model with fewer layers: zero1 assigns tensors by the sizes of all layers.

    Raises:
        UserError: there are fewer tensors than GPUs.
    """
    if setting.mode != "zero1":
        return setting
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = fake_model(config, setting.train, torch.device("cpu"))
        trained = [parameter for _, parameter in named_trained(model)]
    rank, owners = fullest_owner(trained, setting.gpus)
    mine = (parameter for parameter, owner in zip(trained, owners, strict=True) if owner == rank)
    return replace(setting, local_shapes=tuple((parameter.shape, parameter.dtype) for parameter in mine))


def shallow_models(model: TracedModel, repetition: Repetition) -> list[TracedModel]:
    """The model with the layers of each depth."""
    fewer = model.with_setting(for_fewer_layers(model.setting, model.config))
    return [fewer.with_config(with_layers(model.config, depth)) for depth in repetition.depths]


def stage_in_shallow_model(model: TracedModel, stage: int, layers: int, period: int) -> TracedModel:
    """The model for a trace of a stage with a number of layers: other stages have as few as they can.

    A stage begins where layers begin to repeat, so before it is a period of them.
    """
    counts = [0] * model.setting.layout.pipeline
    counts[stage] = layers
    if stage > 0:
        counts[stage - 1] = period
    if stage < len(counts) - 1:
        counts[stage + 1] = 1
    shallow = model.with_config(with_layers(model.config, sum(counts)))
    return shallow.with_setting(model.setting.of_stage(stage, tuple(counts)))


def divide_layers(layers: int, stages: int, period: int, peak_of: PeakOf) -> tuple[int, ...]:
    """Number of layers of each stage, with the lowest peak of the fullest stage.

    Stages begin where layers begin to repeat. A peak grows with the layers, so it is the best to give each next period
    to the stage that then has the lowest peak.

    Raises:
        UserError: there are too few layers.
    """
    blocks = -(-layers // period)
    if blocks < stages:
        raise UserError(
            f"train.pipeline_stages: must be at most {blocks}, so that each stage has {period} of {layers} layers; got "
            f"{stages}; lower it"
        )
    short = blocks * period - layers  # The last period may be incomplete.
    counts = [period] * stages
    counts[-1] -= short
    for _ in range(blocks - stages):
        stage = min(range(stages), key=lambda number: (peak_of(number, counts[number] + period), number))
        counts[stage] += period
    return tuple(counts)


# Extrapolate the peaks of a deep model exactly from traces of shallow ones.
#
# A *window* is the part of a phase in which one layer runs. If layers are alike, one more layer adds the same bytes to
# every instant of a window: in forward, lower layers have saved their activations; in backward, upper layers have left
# their gradients; nothing else depends on depth. So the highest instant of a window stays the same, and the number of
# live tensors of each size is linear in depth. A few tensors list something of every layer (the norms that clipping
# stacks); their size is linear instead.
#
# There are windows for the first layers, for the last ones, and for operations outside of any layer. Layers in the
# middle are linear between those two ends, so none exceeds both. Outside of layers (norms and update) instants inside
# operations have a window of their own, because temporary memory grows differently from lists of tensors.
#
# Three depths are traced: two define the line, and the third must lie on it, for every window and every size.

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
        storage_id = super()._add(count, category)
        self._inside = False
        return storage_id

    def _update_peak(self) -> None:
        super()._update_peak()
        if self._phase is None:
            return
        layer = self._layer()
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
    """Windows near both ends of a model of `repetition.layers` layers, from traces at `repetition.depths`.

    Raises:
        NotRepeated: memory is not linear in depth.
    """
    found = [trace.windows() for trace in traces]
    _check_middle(found[-1], repetition, granularity_bytes)
    depths = zip(found, repetition.depths, strict=True)
    placed = [dict(_placed(windows, depth, repetition.period)) for windows, depth in depths]
    if any(windows.keys() != placed[-1].keys() for windows in placed):
        raise NotRepeated("a phase runs in some depths alone")
    more = (repetition.layers - repetition.depths[-1]) // repetition.period
    return {
        place: replace(window, contents=_extended([windows[place].contents for windows in placed], more))
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
    """Peak of offloaded bytes in a deep model, from traces at `repetition.depths`.

    Raises:
        NotRepeated: they are not linear in depth.
    """
    first, second, third = (trace.offloaded_peak_bytes for trace in traces)
    if third - second != second - first:
        raise NotRepeated(f"{first}, {second}, {third} bytes are offloaded")
    return third + (third - second) * ((repetition.layers - repetition.depths[-1]) // repetition.period)


def _placed(windows: Mapping[tuple[int, int], Window], depth: int, period: int) -> Iterator[tuple[WindowKey, Window]]:
    """Windows by place; a layer near both ends of a shallow model has two places."""
    for (visit, layer), window in windows.items():
        if layer in (BEFORE, AFTER, INSIDE):
            yield (visit, "outside", layer), window
        elif layer <= period:
            yield (visit, "first", layer), window
        if layer >= depth - 1 - period:
            yield (visit, "last", depth - 1 - layer), window


def _check_middle(windows: Mapping[tuple[int, int], Window], repetition: Repetition, granularity_bytes: int) -> None:
    """Check that windows between the first and the last layer are linear in the layer's number.

    Raises:
        NotRepeated: they are not.
    """
    period, depth = repetition.period, repetition.depths[-1]
    sizes = {key: peak_of_contents(window.contents, granularity_bytes).bytes for key, window in windows.items()}
    for visit, layer in windows:
        if layer < 1 or layer + 2 * period > depth - 2:
            continue
        series = low, middle, high = [sizes.get((visit, layer + k * period)) for k in range(3)]
        if low is None or middle is None or high is None or middle - low != high - middle:
            raise NotRepeated(f"layers {layer} to {layer + 2 * period} hold {series} bytes")


def _extended(depths: Sequence[Contents], more: int) -> Contents:
    """Contents of a window `more` steps of depth beyond the last of three.

    Raises:
        NotRepeated: neither the number of tensors of a size nor the sizes are linear in depth.
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
    # Tensors of several depths are matched by category, then size.
    lists = [sorted(left.elements(), key=lambda t: (t[0][0], t[1], str(t[0]))) for left in grown]
    if len({len(sizes) for sizes in lists}) > 1:
        raise NotRepeated("tensors of a size come and go with depth")
    for (label, low), (_, middle), (other, high) in zip(*lists, strict=True):
        if label[0] != other[0] or middle - low != high - middle:
            raise NotRepeated(f"tensors of {label[0]} have {low}, {middle}, {high} bytes")
        # A tensor that grows with depth has no known shape at this depth.
        label = tuple(one if one == another else None for one, another in zip(label, other, strict=True))
        result[label, high + (high - middle) * more] += 1
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
