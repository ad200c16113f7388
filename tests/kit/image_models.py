"""Published models that are trained on rows with images, with the values of their config.json."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lean_finetune.core.atomic_files import read_json

IMAGE_MODELS = Path(__file__).with_name("published_images.json")


def image_models() -> dict[str, Mapping[str, Any]]:
    """The values of config.json by model."""
    return {model["model"]: model["config"] for model in read_json(IMAGE_MODELS)}
