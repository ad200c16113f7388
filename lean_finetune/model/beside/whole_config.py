"""Whole models: which are built with their parts beside decoder and head."""

import copy
from collections.abc import Iterable

from transformers import PretrainedConfig

from lean_finetune.config.schema import Train
from lean_finetune.islands.tower import TOWER

IS_WHOLE = "_is_whole"
"""Attribute of the config of a model that is built with its parts beside decoder and head."""


def whole_config(config: PretrainedConfig) -> PretrainedConfig:
    """The config of a model that is built with its parts beside decoder and head."""
    config = copy.deepcopy(config)
    setattr(config, IS_WHOLE, True)
    return config


def is_whole(config: PretrainedConfig) -> bool:
    """Whether a model of this config has its parts beside decoder and head."""
    return bool(getattr(config, IS_WHOLE, False))


def masks_rows(config: PretrainedConfig) -> bool:
    """Whether attention has a mask of what passes through these parts, of which tokens see each other."""
    return is_whole(config) and TOWER.mask_argument(config) is not None


def as_published(config: PretrainedConfig) -> PretrainedConfig:
    """The config as it is published: how we build the model is not part of it."""
    config = copy.deepcopy(config)
    if is_whole(config):
        delattr(config, IS_WHOLE)
    return config


def any_beside(names: Iterable[str]) -> bool:
    """Whether one of an adapter's tensors belongs to a part beside decoder and head."""
    return any(map(TOWER.is_beside, names))


def refuse_parts(train: Train, config: PretrainedConfig) -> None:
    """Refuse to train parts that the model is built without, and switches that do not know the parts that it has.

    Raises:
        UserError: with the parameter and the remedy.
    """
    (TOWER.refuse_switches if is_whole(config) else TOWER.refuse_trained_parts)(train)
