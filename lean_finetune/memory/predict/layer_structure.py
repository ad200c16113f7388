"""Find how a model's layers repeat, by comparing their structure, so that a few traced layers represent all."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from lean_finetune.config.train_schema import Train
from lean_finetune.core.errors import UserError
from lean_finetune.memory.predict.setting import Setting
from lean_finetune.model.empty_model import meta_model
from lean_finetune.step.pipeline_parts import decoder_layers

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


def _signatures(config: PretrainedConfig) -> list[Signature] | None:
    """Signature of each layer, or None if the model has no list of layers."""
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


def is_pipeline(setting: Setting) -> bool:
    """Whether a setting describes a complete pipeline, not one stage."""
    sharing = setting.sharing
    return sharing is not None and sharing.spec.pipeline_stages > 1 and sharing.stage is None


def stages_of(setting: Setting) -> list[Setting]:
    """The setting of each stage of a pipeline whose layers are divided; without one, the setting itself."""
    counts = None if setting.sharing is None else setting.sharing.spec.stage_layers
    return [setting] if counts is None else [of_stage(setting, stage, counts) for stage in range(len(counts))]


def of_stage(setting: Setting, stage: int, stage_layers: tuple[int, ...]) -> Setting:
    """The setting of one stage of a pipeline."""
    assert setting.sharing is not None
    spec = replace(setting.sharing.spec, stage_layers=stage_layers)
    return replace(setting, sharing=replace(setting.sharing, stage=stage, spec=spec))


def stage_in_shallow_model(
    config: PretrainedConfig, setting: Setting, stage: int, layers: int, period: int
) -> tuple[PretrainedConfig, Setting]:
    """The model and setting for a trace of a stage with a number of layers: other stages have as few as they can.

    A stage begins where layers begin to repeat, so before it is a period of them.
    """
    assert setting.sharing is not None
    counts = [0] * setting.sharing.spec.pipeline_stages
    counts[stage] = layers
    if stage > 0:
        counts[stage - 1] = period
    if stage < len(counts) - 1:
        counts[stage + 1] = 1
    return with_layers(config, sum(counts)), of_stage(setting, stage, tuple(counts))


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
