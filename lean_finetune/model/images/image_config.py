"""Which models are built with their parts for images, and the names of these parts."""

import copy
from collections.abc import Iterable

from transformers import PretrainedConfig

TAKES_IMAGES = "_takes_images"
"""Attribute of the config of a model that is built with its parts for images."""
VISION_PARTS = tuple(
    f"model.{name}"
    for name in ("visual", "vision_tower", "vision_model", "multi_modal_projector", "connector", "image_newline")
)
"""Names of the parts for images in transformers' classes."""

SEE_EACH_OTHER = "token_type_ids"
"""Argument of models in which the tokens of an image see each other: which tokens these are."""
MASKED_FAMILIES = ("gemma3",)
"""Families with this argument: attention of rows with images has a mask."""


def with_images(config: PretrainedConfig) -> PretrainedConfig:
    """The config of a model that takes images: built with its vision tower and projector."""
    config = copy.deepcopy(config)
    setattr(config, TAKES_IMAGES, True)
    return config


def takes_images(config: PretrainedConfig) -> bool:
    """Whether a model of this config has its vision tower and projector."""
    return bool(getattr(config, TAKES_IMAGES, False))


def masks_images(config: PretrainedConfig) -> bool:
    """Whether attention of rows with images has a mask, so that the tokens of an image see each other."""
    return takes_images(config) and config.model_type in MASKED_FAMILIES


def without_images(config: PretrainedConfig) -> PretrainedConfig:
    """The config as it is published: how we build the model is not part of it."""
    config = copy.deepcopy(config)
    if takes_images(config):
        delattr(config, TAKES_IMAGES)
    return config


def part_of_images(name: str) -> bool:
    """Whether a module or a tensor is in a part for images."""
    return any(f".{part}." in f".{name}." for part in VISION_PARTS)


def are_of_images(names: Iterable[str]) -> bool:
    """Whether one of an adapter's tensors belongs to a part for images."""
    return any(map(part_of_images, names))
