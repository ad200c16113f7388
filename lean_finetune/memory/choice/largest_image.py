"""The largest image, in the proportions of the assumed one, with which a run fits."""

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lean_finetune.config.field_types import MAX_PIXELS
from lean_finetune.core.errors import RowFault, UserError
from lean_finetune.images.image_family import Size
from lean_finetune.islands.tower import TOWER
from lean_finetune.memory.advice.full_rows import full_rows_run
from lean_finetune.memory.advice.run import Run
from lean_finetune.memory.advice.search import REFUSED
from lean_finetune.memory.advice.what_fits import PRECISION, meets
from lean_finetune.memory.predict.assumed_images import RowOfImages
from lean_finetune.model.model_config import max_positions

UNIT_PIXELS = 1 << 14
"""Images are tried in multiples of so many pixels, in which peaks grow linearly."""
IMAGE_TRACES = 6
TRAINED_TRACES = 2
"""Of a tower that is trained: a trace of all its layers takes minutes."""


@dataclass(frozen=True, kw_only=True)
class LargestImage:
    """The answer."""

    size: Size | None
    """None if nothing fits."""
    limit: str | None
    """What limits it if that is not memory; None if it is."""

    def as_json(self) -> dict[str, Any]:
        """For `fit --json`."""
        width, height = (None, None) if self.size is None else (self.size.width, self.size.height)
        return {"width": width, "height": height, "limit": self.limit}


def largest_image(run: Run, row: RowOfImages, usable_bytes: int, peak_bytes: int) -> LargestImage:
    """The largest image with which a run with full rows like `row` fits; `peak_bytes` is the run's own peak.

    It was traced and fits; a larger one by more than one part in `PRECISION` of its pixels does not, or was not tried.
    """
    most, limit = _most(run, row)
    given = row.assumed.size.height * row.assumed.size.width / UNIT_PIXELS
    trained = set(TOWER.modes(run.setting.train).values()) != {"frozen"}
    known: dict[float, int] = {given: peak_bytes}
    for _ in range(TRAINED_TRACES if trained else IMAGE_TRACES):
        units = _guess_units(known, usable_bytes, most)
        if units in known or not units:
            break
        known[units] = _peak_with(run, row, units)
    largest = max((units for units, size in known.items() if size <= usable_bytes), default=0)
    if not largest:
        return LargestImage(size=None, limit=None)
    size = row.assumed.size if largest == given else scaled(row.assumed.size, int(largest))
    return LargestImage(size=size, limit=limit if largest >= most else None)


def _guess_units(known: Mapping[float, int], usable_bytes: int, most: int) -> int:
    """The units to try next; those of a known peak, or none, if it is not worth it."""
    if len(known) == 1:
        return 1 if min(known) > 1 else 2
    met = meets(known, usable_bytes)
    fits = max((units for units, size in known.items() if size <= usable_bytes), default=0)
    over = min((units for units, size in known.items() if size > usable_bytes), default=most + 1)
    guess = most if met is None else int(met * (1 - 1 / (2 * PRECISION)))
    guess = min(guess, most, math.ceil(over) - 1)
    return guess if guess > fits * (1 + 1 / PRECISION) else 0


def scaled(size: Size, units: int) -> Size:
    """An image of so many units in the proportions of another."""
    scale = math.sqrt(units * UNIT_PIXELS / (size.height * size.width))
    return Size(height=max(1, round(scale * size.height)), width=max(1, round(scale * size.width)))


def _most(run: Run, row: RowOfImages) -> tuple[int, str]:
    """The most units that are worth trying, and why no more."""
    size, counts = row.assumed.size, range(1, MAX_PIXELS // UNIT_PIXELS + 1)
    most_patches = row.processor.patches(scaled(size, counts[-1]))
    stop = 1 + bisect_left(counts, True, key=lambda units: row.processor.patches(scaled(size, units)) >= most_patches)
    room = bisect_left(counts, True, key=lambda units: not _has_room(run, row.sized(scaled(size, units))))
    if room < stop:
        what = "the model's positions" if row.assumed.beside_text else "data.max_length"
        return max(room, 1), what
    own = "its image processor" if run.params.data.image_max_pixels is None else "data.image_max_pixels"
    return stop, f"{own}: a larger one is made smaller, so any fits"


def _has_room(run: Run, row: RowOfImages) -> bool:
    """Whether the images fit in the longest row and in bucket.max_patches."""
    try:
        row.length(run.params.data.max_length, max_positions(run.config))
    except UserError:
        return False
    return run.bucket.max_patches is None or row.row_patches <= run.bucket.max_patches


def _peak_with(run: Run, row: RowOfImages, units: int) -> int:
    """The predicted peak with images of so many units."""
    images = replace(row.assumed, size=scaled(row.assumed.size, units))
    try:
        return full_rows_run(run.params, run.config, run.device, assumed=images).predict().peak.bytes
    except (RowFault, UserError):  # Proportions that rounding makes extreme.
        return REFUSED.bytes
