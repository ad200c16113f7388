"""The micro-batches of a trace, as fake tensors."""

from collections.abc import Hashable, Mapping, Sequence

import torch

from lean_finetune.memory.trace.cached_fake_mode import CachedFakeMode
from lean_finetune.rows.attachment import Attachment
from lean_finetune.step.batches import Batch, BatchShape, empty_batch

CPU = torch.device("cpu")
Given = tuple[torch.Tensor, Mapping[str, torch.Tensor]]
"""Token ids of a batch, and the model's arguments beside them."""


class FakeBatches:
    """Makes them for rows of text; subclasses do for rows that carry more for the model."""

    @property
    def source(self) -> tuple[Hashable, ...]:
        """Equal if the same micro-batches are made for a model."""
        return ()

    def mode(self) -> CachedFakeMode:
        """The fake mode in which the model runs."""
        return CachedFakeMode()

    def batch(self, shape: BatchShape, parts: int = 1) -> Batch:
        """A micro-batch of the plan; `parts` as of `empty_batch`."""
        return empty_batch(shape, CPU, parts)

    def of_worst(self, shape: BatchShape) -> Given | None:
        """What is given to the model for rows of such a shape, or like the worst row; None for text alone."""
        return None

    def like_worst(self, shape: BatchShape, parts: int = 1) -> Batch:
        """A batch of other rows than the plan's: those of the shape, or like the worst row."""
        return empty_batch(shape, CPU, parts)

    def with_rows(self, attached: Sequence[Attachment], trained: Sequence[Attachment]) -> "FakeBatches":
        """The same, if the worst row is among others than the trained ones; arguments are what both carry."""
        return self


TEXT_ALONE = FakeBatches()
