"""Images in the plan: their patches limit micro-batches, and each micro-batch knows those of its own rows."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lean_finetune.core.errors import UserError
from lean_finetune.images.attachment import ImageAttachment, ImageShape, sizes_of
from lean_finetune.memory.predict.traced_step import halved
from lean_finetune.plan.batch_plan import MicroBatch, Plan, memory_figures
from lean_finetune.plan.micro_batches import MicroBatchSettings
from lean_finetune.plan.optimizer_steps import RowIndex, run_steps
from lean_finetune.plan.planner import PlanSettings
from lean_finetune.step.batches import BatchShape

ROWS = 40
COUNTS = np.arange(ROWS) % 3
"""Images of each row: none, one or two."""
BOUNDS = np.append(0, np.cumsum(COUNTS))
SIZES = np.stack([56 + 28 * (np.arange(BOUNDS[-1]) % 4), np.full(BOUNDS[-1], 56)], axis=1).astype(np.int32)
PATCHES = np.array([(SIZES[a:b].prod(1) // 196).sum() for a, b in zip(BOUNDS[:-1], BOUNDS[1:], strict=True)], np.int32)
IMAGES = ImageAttachment(sizes=SIZES, bounds=BOUNDS, patches=PATCHES, max_pixels=None, min_pixels=None)


def index_of(**changes: Any) -> RowIndex:
    lengths = np.full(ROWS, 40, np.int32) + np.arange(ROWS, dtype=np.int32) % 7
    plain = RowIndex(
        lengths=lengths,
        supervised=np.full(ROWS, 5, np.int32),
        sources=np.zeros(ROWS, np.uint16),
        dropped=np.zeros(ROWS, bool),
        weights=(1.0,),
        attached=(IMAGES,),
    )
    return replace(plain, **changes)


def settings_of(mode: str = "bucketed", max_patches: int | None = None) -> PlanSettings:
    micro_batches = MicroBatchSettings(
        mode=mode,  # type: ignore[arg-type]
        max_tokens=512,
        limits={} if max_patches is None else {"max_patches": max_patches},
        pad_multiple=8,
        constant_shape=False,
        fixed_rows=8,
        ranks=1,
    )
    return PlanSettings(micro_batches=micro_batches, seed=0, epochs=2, tokens_per_step=600, weights=(1.0,))


@pytest.mark.parametrize("mode", ["bucketed", "fixed"])
def test_no_micro_batch_has_more_patches_than_allowed_and_steps_have_the_same_rows(mode):
    free, limited = (settings_of(mode, limit).plan(index_of()) for limit in (None, 100))
    patches = [int(PATCHES[one.rows].sum()) for step in limited.steps for one in step]
    assert max(patches) <= 100 < max(int(PATCHES[one.rows].sum()) for step in free.steps for one in step)
    for before, after in zip(free.steps, limited.steps, strict=True):
        rows = [sorted(np.concatenate([one.rows for one in step]).tolist()) for step in (before, after)]
        assert rows[0] == rows[1]


@pytest.mark.parametrize(("row", "moved"), [(21, True), (3, False)])
def test_the_first_steps_have_the_longest_row_and_the_one_with_most_patches(row, moved):
    """A run that is out of memory at its largest image, hours after its start."""
    rows = np.arange(ROWS)
    lengths = (40 + (rows == 3)).astype(np.int32)
    images = replace(IMAGES, patches=PATCHES + 100 * (rows == row))
    index = index_of(lengths=lengths, attached=(images,))
    parts = list(run_steps(index, seed=0, epochs=2, tokens_per_step=200))
    assert 3 in parts[0].rows and row in parts[1 if moved else 0].rows
    assert len(parts[0]) == 1 and (len(parts[1]) == 1) == moved
    used = np.concatenate([part.rows for part in parts if part.epoch == 0])
    assert sorted(used.tolist()) == rows.tolist()


def test_a_row_with_more_patches_than_allowed_is_refused():
    with pytest.raises(UserError, match=r"bucket.max_patches: the images of every row must fit .* has \d+ patches"):
        settings_of(max_patches=int(PATCHES.max()) - 1).plan(index_of())
    with pytest.raises(UserError, match="bucket.max_patches: has an effect only on rows with images; got 9; leave it"):
        settings_of(max_patches=9).plan(replace(index_of(), attached=()))


def test_packing_is_refused():
    with pytest.raises(UserError, match="bucket.mode: rows with images cannot be packed"):
        settings_of("packed").plan(index_of())


def test_half_a_shape_has_its_largest_images():
    sizes = (((56, 56),), ((560, 56),), (), ((100, 100), (100, 100)))
    shape = BatchShape(rows=4, length=64, supervised=20, packed_lengths=None, attached=(ImageShape(sizes=sizes),))
    fewer = halved(((shape,),))
    assert fewer is not None and sizes_of(fewer[0][0].attached) == (sizes[1], sizes[3])


def test_rows_with_images_are_not_shortened():
    with pytest.raises(UserError, match="data.max_length: would cut images"):
        index_of().shortened(30)
    assert (index_of(attached=()).shortened(30).lengths == 30).all()


def runs_beside(micro_batch: MicroBatch | BatchShape) -> bool:
    return any(isinstance(one, ImageShape) and one.beside for one in micro_batch.attached)


def test_a_gpu_without_images_runs_the_tower_in_the_turns_in_which_others_do():
    """A turn of two GPUs that only one of them knows to have images, or the fewest patches counted as none."""
    shown, text = np.array([1], np.int32), np.array([0], np.int32)
    turns = [(shown, text), (text, text), (text[:0], shown), (shown, shown)]
    micro_batches = [
        MicroBatch(epoch=0, step=0, rank=rank, rows=rows, length=46 * len(rows), supervised=5 * len(rows))
        for turn in turns
        for rank, rows in enumerate(turn)
    ]
    plan = replace(Plan.of(micro_batches, ranks=2), attached=(IMAGES,))
    assert not any(runs_beside(one) for one in plan.steps[0])
    together = replace(plan, attached=(replace(IMAGES, together=True),))
    assert [runs_beside(one) for one in together.steps[0]] == [False, True, False, False, True, False, False, False]
    assert [runs_beside(one) for one in together.of_rank(1).steps[0]] == [True, False, False, False]
    lengths = index_of().lengths
    assert runs_beside(BatchShape.of(together.micro_batch(1), lengths))
    figures = memory_figures(together, lengths, tiled=False, windowed=False)[:, -1]
    assert figures.tolist() == [PATCHES[1], 1, 0, 0, 1, PATCHES[1], PATCHES[1], PATCHES[1]]


def test_padded_pixels_find_the_micro_batch_with_one_large_image_among_small_ones():
    """Pixtral pads images: a micro-batch with fewer patches may have more pixels."""
    frames = np.array([[100, 100], [100, 100], [400, 50], [10, 10]], np.int32)
    bounds, sizes = np.array([0, 1, 2, 3, 5]), np.ones((5, 2), np.int32)
    padded = ImageAttachment(
        sizes=sizes, bounds=bounds, patches=np.ones(4, np.int32), frames=frames, max_pixels=None, min_pixels=None
    )
    found = padded.padded_pixels(np.array([0, 1, 2, 3]), np.array([0, 2, 2, 4, 4]))
    assert found.tolist() == [2 * 100 * 100, 0, 3 * 400 * 50, 0]  # A GPU may have no row.


def test_only_a_row_that_is_longer_than_the_limit_is_cut():
    """A row of images that just fits, refused."""
    lengths = np.full(ROWS, 40, np.int32)
    IMAGES.refuse_cut(lengths, 40)
    with pytest.raises(UserError, match="data.max_length: would cut images of rows; got 39"):
        IMAGES.refuse_cut(lengths, 39)
    lengths[COUNTS == 0] = 99
    IMAGES.refuse_cut(lengths, 40)
