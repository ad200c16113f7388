"""Rows with images in configurations of other tools: their size, their limits, and the parts that are trained."""

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lean_finetune.commands.convert.conversions import Converted
from lean_finetune.commands.convert.layer_patterns import adapted_parts
from lean_finetune.core.errors import UserError, shortened
from lean_finetune.images.crop_families import Granite4Vision, Idefics3, Llava, MiniCpmV46, Ovis2
from lean_finetune.images.families import Gemma3, Gemma4, Pixtral, family_of_images
from lean_finetune.images.image_family import FEWEST, MOST, ImageFamily, Size
from lean_finetune.islands.objectives.registry import OBJECTIVES, SFT
from lean_finetune.pinning.config_file import CONFIG_FILE, json_object

ASSUMED = Size(height=768, width=1024)
"""The size of images where nothing limits it."""
NAMES: tuple[tuple[str, type[ImageFamily]], ...] = (
    (r"(?i)gemma-?3(?!n)", Gemma3),
    (r"(?i)gemma-?4", Gemma4),
    (r"(?i)granite.*vision", Granite4Vision),
    (r"(?i)llava(?!.*onevision)", Llava),
    (r"(?i)minicpm-?v-?4[._]6", MiniCpmV46),
    (r"(?i)ovis-?2(?![._]5)", Ovis2),
    (r"(?i)pixtral|mistral.?small", Pixtral),
    (r"(?i)smolvlm|idefics3", Idefics3),
)
"""Parts of names of models and templates whose images have sizes of their own, not limits of both kinds."""
WITH_PROJECTOR = "visual"
"""The tower of Qwen's models, whose projector is a part of it."""
WHOLE_TOWERS = (WITH_PROJECTOR, "vision_tower", "vision_model", "vision_encoder")
AUDIO = re.compile(r"(?i)voxtral|audio|speech")


def combine_images(facts: Mapping[str, Any], converted: Converted, path: Path, by_name: str | None) -> None:
    """The images of a configuration whose rows have some: their size, and what is trained of the vision parts.

    `by_name`: what has images by its name, of a tool whose configuration does not say it otherwise.

    Raises:
        UserError: what is trained cannot be had here, or a size has another form.
    """
    values, tool = converted.values, converted.tool
    limits = [key for key in ("data.image_max_pixels", "data.image_min_pixels") if key in values]
    if tool == "LLaMA-Factory" and not (by_name or set(limits) & set(converted.used.values())):
        for key in limits:
            del values[key]
        return
    if tool != "LLaMA-Factory" and "processor" not in facts:
        return
    processor = str(facts.get("processor", ""))
    if AUDIO.search(processor):
        raise UserError(f"{path}: processor_type: audio is not trained here; got {processor}; run it with {tool}")
    if OBJECTIVES[values.get("train.objective", SFT)].compares:
        raise UserError(
            f"{path}: rows with images are trained with objective sft alone here; got {values['train.objective']}; "
            f"run it with {tool}"
        )
    if facts.get("freeze_language"):
        raise UserError(
            f"{path}: freeze_language_model: the language model is always trained here; got true; change it, or run it "
            f"with {tool}"
        )
    if values.get("bucket.mode") == "packed":
        values["bucket.mode"] = "bucketed"
        converted.differs.append("rows with images are not packed here: bucket.mode=bucketed")
    if values.get("train.attention") == "flash_attention_2":  # Not for every family with images.
        values["train.attention"] = "auto"
        converted.differs.append("the attention kernel of rows with images is chosen here: train.attention=auto")
    full = values["train.method"] == "full"
    for part in ("vision", "projector"):
        if tool == "LLaMA-Factory":
            trained = not facts.get(f"freeze_{part}", True)
        else:
            trained = not facts.get("freeze_parts") and (full or part in converted.adapted_parts)
        values[f"train.{part}"] = ("full" if full else "lora") if trained else "frozen"
    _train_copied_parts(converted)
    converted.image = _size(facts, values, path)
    _drop_limits(facts, converted)
    size = converted.image
    converted.differs.append(
        f"rows have images ({by_name or 'by its keys'}): one of {size.width} x {size.height} in each is assumed; "
        f"--image and --images-per-row of `fit` set others; train.vision={values['train.vision']}, "
        f"train.projector={values['train.projector']}"
    )


def _train_copied_parts(converted: Converted) -> None:
    """Train the tower and the projector in full where they are named as modules of which copies are trained."""
    values = converted.values
    for name in values.get("train.lora.modules_to_save") or []:
        parts = {*adapted_parts([name])}
        last = name.rpartition(".")[2]
        if "vision" in parts and last not in WHOLE_TOWERS:
            converted.differs.append(f"{name} is a part of the vision tower: all of it is trained here")
        if last == WITH_PROJECTOR:
            parts.add("projector")
        values.update({f"train.{part}": "full" for part in parts})
        if parts:
            others = [other for other in values["train.lora.modules_to_save"] if other != name]
            values["train.lora.modules_to_save"] = others


def _drop_limits(facts: Mapping[str, Any], converted: Converted) -> None:
    """Leave out limits of pixels that the model's family does not take: it makes images of its own sizes."""
    family = _family(converted.values, str(facts.get("template", "")))
    for key in (MOST, FEWEST):
        if family is not None and key not in family.limits and converted.values.pop(key, None) is not None:
            given = [name for name, ours in converted.used.items() if ours == key]
            for name in given:
                del converted.used[name]
                converted.differs.append(
                    f"{name}={shortened(str(converted.keys[name]))}: {family.processor_class} makes images of its "
                    "own sizes"
                )


def _family(values: Mapping[str, Any], template: str) -> type[ImageFamily] | None:
    """The family of the model by its config.json, or by the names of model and template; None for an unknown one."""
    name = str(values.get("model.name", ""))
    if os.path.isfile(os.path.join(name, CONFIG_FILE)):
        config = json_object(Path(name) / CONFIG_FILE)
        tower = config.get("vision_config")
        if isinstance(tower, dict) and tower.get("model_type") == "pixtral":
            return Pixtral
        return family_of_images(config.get("model_type"))
    return next((one for pattern, one in NAMES if re.search(pattern, f"{name} {template}")), None)


def _size(facts: Mapping[str, Any], values: dict[str, Any], path: Path) -> Size:
    """The size of the largest images, or an assumption. Axolotl pads images to the size that it is given."""
    given = facts.get("image_size")
    if given is not None:
        sides = given if isinstance(given, list) else [given, given]
        if len(sides) != 2 or not all(isinstance(side, int) and 0 < side <= 1 << 14 for side in sides):
            raise UserError(f"{path}: image_size: must be pixels, or width and height; got {shortened(str(given))}")
        values["data.image_max_pixels"] = sides[0] * sides[1]
        return Size(height=sides[1], width=sides[0])
    most = values.get("data.image_max_pixels")
    if most is None or most >= ASSUMED.height * ASSUMED.width:
        return ASSUMED
    side = max(1, math.isqrt(most))
    return Size(height=side, width=side)
