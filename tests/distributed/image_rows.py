"""Rows with images for runs of several processes: a micro-batch may have none where another process's has some."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lean_finetune.config.parallel_layout import ParallelLayout
from lean_finetune.images.image_inputs import ImageInputs, ImagePart
from lean_finetune.images.processor import ImageProcessor, Size
from lean_finetune.model.model_config import read_config
from lean_finetune.step.batches import Batch, collate, idle_batch
from tests.step.common import rows

SIZES: dict[int, list[tuple[int, int]]] = {0: [(60, 90)], 3: [(56, 56), (84, 120)], 5: [(120, 64)], 7: [(70, 70)]}
"""Height and width of the images of some of the eight rows."""


@cache
def inputs_of(directory: str) -> ImageInputs:
    """What makes a model's arguments for images."""
    return ImageInputs(ImageProcessor(Path(directory)), read_config(Path(directory), whole=True))


def _photo(size: tuple[int, int]) -> Image.Image:
    return Image.fromarray(np.random.default_rng(size).integers(0, 255, (*size, 3), dtype=np.uint8))


def _row(number: int, inputs: ImageInputs, *, shown: bool) -> tuple[np.ndarray, np.ndarray, list[Image.Image]]:
    """Tokens, trained spans and images of a row."""
    ids, spans = rows()[number]
    sizes = SIZES.get(number, []) if shown else []
    places = [[inputs.image_token_id] * inputs.tokens(Size(*size)) + [4] for size in sizes]
    filled = np.array([*(token for place in places for token in place), *ids], np.int64)
    return filled, spans + len(filled) - len(ids), [_photo(size) for size in sizes]


def image_batches(
    directory: str, sizes: tuple[int, ...], layout: ParallelLayout, rank: int, *, shown: bool, together: bool
) -> tuple[list[Batch], int]:
    """The micro-batches of one process, with as many rows as `sizes` says, and the trained tokens of all processes.

    Without `shown`, the rows lack their images. `together` is `Train.runs_towers_together`.
    """
    inputs, found, start = inputs_of(directory), list[Batch](), 0
    for size in sizes:
        group: list[Any] = [_row(number, inputs, shown=shown) for number in range(start, start + size)]
        batch = collate([(ids, spans) for ids, spans, _ in group], max(len(ids) for ids, _, _ in group), 0)
        images = [one for _, _, one in group]
        made = inputs.tensors(batch.input_ids_BT, images) if any(images) else None
        found.append(batch if made is None else replace(batch, parts=(ImagePart(shown=made),)))
        start += size
    supervised = sum(len(batch.supervised_index_N) for batch in found)
    found += [idle_batch(0)] * (-len(found) % layout.data)
    index, own = layout.coordinates(rank).data, list[Batch]()
    for turn in range(0, len(found), layout.data):
        batch, others = found[turn + index], found[turn : turn + layout.data]
        beside = together and not batch.parts and any(other.parts for other in others)
        own.append(replace(batch, parts=(ImagePart(blank=inputs.blank),)) if beside else batch)
    return own, supervised
