"""Which models are built with their parts for images, and the names of these parts."""

import copy
from collections.abc import Iterable

from transformers import PretrainedConfig

from lean_finetune.data.images.families import family_of_images

TAKES_IMAGES = "_takes_images"
"""Attribute of the config of a model that is built with its parts for images."""
VISION_PARTS = tuple(
    f"model.{name}"
    for name in (
        *("visual", "vision_tower", "vision_model", "multi_modal_projector", "connector", "image_newline"),
        "embed_vision",
    )
)
"""Names of the parts for images in transformers' classes."""

AUDIO_PARTS = ("model.audio_tower", "model.embed_audio")
"""Names of the audio parts. No row has audio, so a model with images is built without them."""


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
    return takes_images(config) and mask_argument(config) is not None


def mask_argument(config: PretrainedConfig) -> str | None:
    """The argument that says which tokens images fill; None where the tokens of images see those before them."""
    family = family_of_images(config.model_type)
    return None if family is None else family.mask_argument(config)


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
