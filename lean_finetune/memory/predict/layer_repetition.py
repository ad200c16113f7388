"""How the layers of a model repeat, and the shallow models that stand for it in traces."""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PretrainedConfig

from lean_finetune.config.schema import Train
from lean_finetune.core.errors import UserError
from lean_finetune.memory.predict.traced_step import TracedModel
from lean_finetune.memory.trace.setting import Setting
from lean_finetune.model.empty_model import decoder_layers, meta_model
from lean_finetune.model.load_model import fake_model
from lean_finetune.step.parallel_model import fullest_owner, named_trained

Signature = tuple[Any, ...]
"""Structure of a layer: its modules, their parameters' shapes, and their plain attributes."""

PeakOf = Callable[[int, int], int]
"""Predicted bytes of a stage of a pipeline with a number of layers."""


@dataclass(frozen=True, kw_only=True)
class Repetition:
    """How a model's layers repeat."""

    layers: int
    period: int
    """Layer k is like layer k - period, for every k from period on."""
    recomputed: int = 0
    """The first layers, if they alone are recomputed; 0 if all layers are treated alike."""
    only: int | None = None
    """The one part of which traces have fewer layers; None if each may."""

    @property
    def parts(self) -> tuple[int, ...]:
        """The numbers of consecutive layers that are treated alike."""
        return (self.recomputed, self.layers - self.recomputed) if self.recomputed else (self.layers,)

    @property
    def deepened(self) -> tuple[int, ...]:
        """The parts of which traces have fewer layers, by number."""
        if len(self.parts) == 1:
            return (0,)
        deep = [n for n, count in enumerate(self.parts) if count > self._fewest(count) + 2 * self.period]
        return tuple(n for n in deep if self.only in (None, n))

    @property
    def more(self) -> tuple[int, ...]:
        """By how many periods each deepened part is deeper than in the shallowest trace."""
        return tuple((self.parts[n] - self._fewest(self.parts[n])) // self.period for n in self.deepened)

    @property
    def traced(self) -> tuple[tuple[int, ...], ...]:
        """The layers of each part in each trace.

        The shallowest; one with another period of layers in each deepened part; and one with two more in all of them,
        which can contradict the lines that the others give. Their last layers are of the same kinds as this model's.
        """
        shallowest = {n: self._fewest(self.parts[n]) for n in self.deepened}
        deeper = [{**shallowest, n: shallowest[n] + self.period} for n in self.deepened]
        deepest = {n: count + 2 * self.period for n, count in shallowest.items()}
        return tuple(
            tuple(counts.get(n, count) for n, count in enumerate(self.parts))
            for counts in (shallowest, *deeper, deepest)
        )

    @property
    def depths(self) -> tuple[int, ...]:
        """The layers of each trace."""
        return tuple(map(sum, self.traced))

    @property
    def pays(self) -> bool:
        """Whether fewer layers are traced than the model has."""
        return bool(self.deepened) and sum(self.depths) < self.layers

    def _fewest(self, count: int) -> int:
        """The layers of a part of `count` layers in the shallowest trace.

        Each trace has a layer of every kind between a part's first and its last layer, and the deepest has three.
        """
        least = self.period + 2
        return least + (count - least) % self.period


def find_repetition(
    config: PretrainedConfig, train: Train, all_layers_reason: str | None = None, *, parts: int = 0
) -> tuple[Repetition | None, str]:
    """How the layers of a model repeat, or None if all of them must be traced; and why.

    `all_layers_reason`: why all must be traced whatever the layers are. `parts`: if the first layers alone are
    recomputed, of how many of the two parts traces may have fewer layers: of none, the larger one or both.
    """
    count = config.get_text_config().num_hidden_layers
    everything = "the only layer" if count == 1 else f"all {count} layers"
    recomputed = (train.grad_ckpt_layers or 0) if train.grad_ckpt else 0
    if all_layers_reason is not None:
        return None, f"{everything}: {all_layers_reason}"
    if recomputed and not parts:
        return None, f"{everything}: the first {recomputed} alone are recomputed"
    if any("." in target for target in train.lora.targets) and train.method != "full":
        return None, f"{everything}: train.lora.targets names layers by path"
    repetition = Repetition(layers=count, period=1, recomputed=recomputed)
    if recomputed and parts == 1:
        repetition = replace(repetition, only=int(recomputed < count - recomputed))
    if not repetition.pays:
        return None, f"{everything}: they are few"
    signatures = layer_signatures(config)
    if signatures is None or len(signatures) != count:
        return None, f"{everything}: the model has no single list of layers"
    alike = next((p for p in range(1, count) if signatures[p:] == signatures[:-p]), count)
    period = math.lcm(alike, train.recomputed_every if train.grad_ckpt else 1)
    repetition = replace(repetition, period=period)
    if alike == count or not repetition.pays:
        return None, f"{everything}: they are not alike, or repeat too seldom"
    deepest = repetition.depths[-1]
    if layer_signatures(with_layers(config, deepest)) != signatures[:deepest]:
        return None, f"{everything}: a model with {deepest} has other layers"
    kinds = "are all alike" if period == 1 else f"repeat every {period}"
    treated = f", and the first {recomputed} alone are recomputed" if recomputed else ""
    return repetition, f"models of {', '.join(map(str, repetition.depths))} layers: its {count} {kinds}{treated}"


def with_layers(config: PretrainedConfig, count: int) -> PretrainedConfig:
    """The config of a model with the first `count` layers."""
    return with_some_layers(config, range(count))


def with_some_layers(config: PretrainedConfig, numbers: Sequence[int]) -> PretrainedConfig:
    """The config of a model with some of the layers, by number."""
    shallow = copy.deepcopy(config)
    text = shallow.get_text_config()
    for name, values in _lists_of_layers(config).items():
        setattr(text, name, type(values)(values[number] for number in numbers))
    text.num_hidden_layers = len(numbers)
    return shallow


def _lists_of_layers(config: PretrainedConfig) -> dict[str, Any]:
    """The values of a config that list something of every layer."""
    text = config.get_text_config()
    count = text.num_hidden_layers
    return {name: v for name, v in vars(text).items() if isinstance(v, list | tuple) and len(v) == count}


def layer_kinds(config: PretrainedConfig) -> list[Signature]:
    """For each layer of a model with a list of layers, its signature and what the config says of it."""
    signatures = layer_signatures(config)
    assert signatures is not None
    return [*zip(signatures, *(map(repr, values) for values in _lists_of_layers(config).values()), strict=True)]


_known_signatures: dict[str, list[Signature] | None] = {}


def layer_signatures(config: PretrainedConfig) -> list[Signature] | None:
    """Signature of each layer, or None if the model has no list of layers. A search asks for few configs many times."""
    key = config_key(config)
    if key not in _known_signatures:
        _known_signatures[key] = _findlayer_signatures(config)
    return _known_signatures[key]


def config_key(config: PretrainedConfig) -> str:
    """Key of a config in a dictionary: equal for configs of the same class and values."""
    return f"{type(config).__qualname__} {config.to_json_string(use_diff=False)}"


def _findlayer_signatures(config: PretrainedConfig) -> list[Signature] | None:
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
    """The model with the layers of each trace."""
    fewer = model.with_setting(for_fewer_layers(model.setting, model.config))
    shallow = [fewer.with_config(with_layers(model.config, depth)) for depth in repetition.depths]
    if not repetition.recomputed:
        return shallow
    trains = (model.setting.train.with_value("grad_ckpt_layers", parts[0]) for parts in repetition.traced)
    return [one.with_setting(replace(one.setting, train=train)) for one, train in zip(shallow, trains, strict=True)]


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
