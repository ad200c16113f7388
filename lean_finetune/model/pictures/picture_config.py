"""Which models are built with their parts for pictures, and the names of these parts."""

import copy
from collections.abc import Iterable

from transformers import PretrainedConfig

TAKES_PICTURES = "_takes_pictures"
"""Attribute of the config of a model that is built with its parts for pictures."""
VISION_PARTS = tuple(
    f"model.{name}"
    for name in ("visual", "vision_tower", "vision_model", "multi_modal_projector", "connector", "image_newline")
)
"""Names of the parts for pictures in transformers' classes."""

SEE_EACH_OTHER = "token_type_ids"
"""Argument of models in which the tokens of a picture see each other: which tokens these are."""
MASKED_FAMILIES = ("gemma3",)
"""Families with this argument: attention of rows with pictures has a mask."""


def with_pictures(config: PretrainedConfig) -> PretrainedConfig:
    """The config of a model that takes pictures: built with its vision tower and projector."""
    config = copy.deepcopy(config)
    setattr(config, TAKES_PICTURES, True)
    return config


def takes_pictures(config: PretrainedConfig) -> bool:
    """Whether a model of this config has its vision tower and projector."""
    return bool(getattr(config, TAKES_PICTURES, False))


def masks_pictures(config: PretrainedConfig) -> bool:
    """Whether attention of rows with pictures has a mask, so that the tokens of a picture see each other."""
    return takes_pictures(config) and config.model_type in MASKED_FAMILIES


def without_pictures(config: PretrainedConfig) -> PretrainedConfig:
    """The config as it is published: how we build the model is not part of it."""
    config = copy.deepcopy(config)
    if takes_pictures(config):
        delattr(config, TAKES_PICTURES)
    return config


def part_of_pictures(name: str) -> bool:
    """Whether a module or a tensor is in a part for pictures."""
    return any(f".{part}." in f".{name}." for part in VISION_PARTS)


def are_of_pictures(names: Iterable[str]) -> bool:
    """Whether one of an adapter's tensors belongs to a part for pictures."""
    return any(map(part_of_pictures, names))
