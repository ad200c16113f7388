"""What rows carry besides tokens is one class: plan, batches, traces' shapes and held-out batches follow from it."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from lean_finetune.core.arrow_files import ArrowWriter, read_column
from lean_finetune.core.errors import UserError
from lean_finetune.memory.predict.other_phases import shapes_carried
from lean_finetune.memory.predict.traced_step import halved, traced_steps
from lean_finetune.plan.batch_plan import Plan
from lean_finetune.plan.optimizer_steps import read_index, run_steps
from lean_finetune.rows.attachment import AttachedShape, Attachment, Measure
from lean_finetune.rows.batch_part import BatchPart
from lean_finetune.step.batch_stream import load
from lean_finetune.step.batches import BatchShape, TokenPart, collate, empty_batch, part_of, with_parts
from lean_finetune.step.token_rows import TokenRows
from lean_finetune.train.heldout_loss import heldout_batches
from tests.plan.common import batch_settings_of, plan_of
from tests.token_files import Row, write_tokens

ROWS = 60
FRAMES = (np.arange(ROWS) * 7 % 13).astype(np.int32)
"""Of each row; none in some."""
LONGEST = 37
FRAMES[LONGEST] = 15


@dataclass(frozen=True)
class Frames(AttachedShape):
    """Frames of each row of a micro-batch."""

    frames: tuple[int, ...]

    @property
    def of_rows(self) -> Hashable:
        return self.frames

    @property
    def attachment(self) -> type[Attachment]:
        return Sounds

    def largest(self, rows: int) -> "Frames":
        return Frames(tuple(sorted(self.frames, reverse=True)[:rows]))

    def empty(self, trained: int, device: torch.device | str) -> "SoundPart":
        return SoundPart(torch.empty(len(self.frames), trained, device=device))


@dataclass(frozen=True)
class SoundPart(BatchPart):
    """Frames of a batch, as an argument of the model."""

    frames_B: torch.Tensor

    def to(self, device: torch.device | str) -> "SoundPart":
        return SoundPart(self.frames_B.to(device))

    def pinned(self) -> "SoundPart":
        return SoundPart(self.frames_B.pin_memory())

    def of_tokens(self, chosen_N: np.ndarray) -> "SoundPart":
        return SoundPart(torch.full_like(self.frames_B, int(chosen_N.sum())))

    @property
    def arguments(self) -> Mapping[str, torch.Tensor]:
        return {"frames": self.frames_B}


@dataclass(frozen=True, kw_only=True, eq=False)
class Sounds(Attachment):
    """Sounds of every row."""

    columns = {"frames": (pa.int32(),)}
    name, rows_text = "sounds", "rows with sound"
    limits = ("max_frames",)

    frames: np.ndarray

    @classmethod
    def from_columns(cls, batches: Any, tokens: Path | None = None) -> "Sounds":
        return cls(frames=read_column(batches, "frames", np.int32))

    @property
    def measures(self) -> tuple[Measure, ...]:
        return (Measure(name="frames", values=self.frames, limit="max_frames", remedy="cut them"),)

    def shape_of(self, rows: np.ndarray, *, beside: bool = False) -> Frames | None:
        found = tuple(self.frames[rows].tolist())
        return Frames(found) if any(found) else None

    def part(self, tokens: Any, rows: np.ndarray, ids_BT: torch.Tensor) -> SoundPart | None:
        return SoundPart(torch.from_numpy(self.frames[rows])) if self.frames[rows].any() else None

    def with_row(self, other: "Sounds", row: int) -> "Sounds":
        return replace(self, frames=np.append(self.frames, other.frames[row]))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> TokenRows:
    draw = np.random.default_rng(3)
    made: list[Row] = [(draw.integers(0, 500, 30 + n % 5).tolist(), [10, 30], None) for n in range(ROWS)]
    opened = TokenRows(write_tokens(tmp_path_factory.mktemp("tokens"), made, block=7), "train")
    opened.attached = (Sounds(frames=FRAMES),)
    return opened


def test_it_is_read_from_its_columns_of_an_index(tmp_path):
    """Sounds of rows without any, or of a file whose column was changed."""
    for name, frames in (("some", [3, 0]), ("none", [0, 0])):
        batch = pa.record_batch({"frames": pa.array(frames, pa.int32())})
        with ArrowWriter(tmp_path / name, batch.schema) as writer:
            writer.write(batch)
    found = Sounds.read(tmp_path / "some")
    assert found is not None and found.frames.tolist() == [3, 0] and Sounds.read(tmp_path / "none") is None
    assert Sounds.read(write_tokens(tmp_path / "tokens", [([1, 2], [1, 2], None)]) / "train-index.arrow") is None
    with ArrowWriter(tmp_path / "other", pa.schema([("frames", pa.int64())])) as writer:
        writer.write(pa.record_batch({"frames": pa.array([1], pa.int64())}))
    with pytest.raises(UserError, match="frames must be int32"):
        Sounds.read(tmp_path / "other")


def planned(rows: TokenRows, most: int | None) -> Plan:
    index = replace(read_index(rows.path.parent / "train-index.arrow", (1.0,)), attached=rows.attached)
    settings = batch_settings_of(max_tokens=256, limits={} if most is None else {"max_frames": most})
    return replace(plan_of(index, settings, tokens_per_step=400), attached=rows.attached)


def test_the_plan_keeps_its_limit_and_begins_with_most_of_it(rows):
    """A micro-batch that a limit of its section of params.yaml excludes, or memory that peaks late in the run."""
    free, limited = planned(rows, None), planned(rows, 20)
    assert limited.most["max_frames"] <= 20 < free.most["max_frames"]
    index = read_index(rows.path.parent / "train-index.arrow", (1.0,))
    fronts = []
    for one in (index, replace(index, attached=rows.attached)):
        _, second, *_ = run_steps(one, seed=1, epochs=1, tokens_per_step=100)
        fronts.append(len(second) == 1 and LONGEST in second.rows)
    assert fronts == [False, True]
    with pytest.raises(UserError, match=r"bucket.max_frames: the sounds of every row must fit .* 15 frames; got 14"):
        planned(rows, 14)


def test_batches_have_its_tensors_and_shapes(rows):
    """Tensors of other rows, or a traced micro-batch without them."""
    plan = planned(rows, 20)
    sizes = [micro_batch.rows for step in plan.steps for micro_batch in step]
    for batch, numbers in zip(load(rows, plan, pad_id=0), sizes, strict=True):
        found = [part.arguments["frames"].tolist() for part in batch.to("cpu").parts]
        assert found == ([FRAMES[numbers].tolist()] if FRAMES[numbers].any() else [])
    shapes = [shape for step in traced_steps(plan, rows.lengths, tiled=False, windowed=False) for shape in step]
    most = max(sum(one.frames) for shape in shapes for one in shape.attached if isinstance(one, Frames))
    assert most == plan.most["max_frames"]
    fewer = halved((tuple(shapes),))
    assert fewer is not None and all(len(one.frames) == shape.rows for shape in fewer[0] for one in shape.attached)  # type: ignore[attr-defined]


@pytest.mark.parametrize("parts", [1, 3])
def test_a_traced_batch_has_fake_tensors_of_it(parts):
    """A prediction without the memory of what the rows carry."""
    shape = BatchShape(rows=2, length=10, supervised=9, packed_lengths=None, attached=(Frames((5, 6)),))
    [part] = empty_batch(shape, "meta", parts).parts
    assert part.arguments["frames"].shape == (2, 9 if parts == 1 else 8)


def test_a_part_of_the_tokens_keeps_what_it_needs(rows):
    """Context parallelism that leaves out what the loss of its tokens needs."""
    numbers = np.array([LONGEST, 2])
    batch = with_parts(collate(rows.gather(numbers), 36, 0), rows, numbers)
    found = [part_of(batch, TokenPart(index=index, parts=2)) for index in range(2)]
    counts = [int(one.parts[0].arguments["frames"][0]) for one in found]
    assert counts == [len(one.supervised_index_N) for one in found] and sum(counts) == rows.supervised[numbers].sum()


def test_heldout_batches_keep_the_limits_of_training(rows):
    """Held-out losses out of memory where every training step fits."""
    found = list(heldout_batches(rows, ROWS, 512, 0, limits={"max_frames": 15}))
    sums = [int(part.arguments["frames"].sum()) for batch in found for part in batch.parts]
    assert sum(sums) == FRAMES.sum() and max(sums) <= 15
    free = list(heldout_batches(rows, ROWS, 512, 0))
    [predicted] = shapes_carried(rows.lengths, rows.attached, 512)
    assert len(free) < len(found)
    most = max(int(part.arguments["frames"].sum()) for batch in free for part in batch.parts)
    assert most <= sum(one.frames[0] for one in predicted.attached if isinstance(one, Frames)) * predicted.rows
