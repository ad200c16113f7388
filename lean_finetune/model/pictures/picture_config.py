"""Which models are built with their parts for pictures, and the names of these parts."""

import copy

from transformers import PretrainedConfig

TAKES_PICTURES = "_takes_pictures"
"""Attribute of the config of a model that is built with its parts for pictures."""
VISION_PARTS = tuple(
    f"model.{name}" for name in ("visual", "vision_tower", "vision_model", "multi_modal_projector", "connector")
)
"""Names of the parts for pictures in transformers' classes."""


def with_pictures(config: PretrainedConfig) -> PretrainedConfig:
    """The config of a model that takes pictures: built with its vision tower and projector."""
    config = copy.deepcopy(config)
    setattr(config, TAKES_PICTURES, True)
    return config


def takes_pictures(config: PretrainedConfig) -> bool:
    """Whether a model of this config has its vision tower and projector."""
    return bool(getattr(config, TAKES_PICTURES, False))
