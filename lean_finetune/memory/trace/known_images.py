"""The micro-batches of a trace that have images, as fake tensors."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch.utils._python_dispatch import _disable_current_modes
from transformers import PretrainedConfig

from lean_finetune.images.attachment import ImageShape, Sizes, images_of, sizes_of
from lean_finetune.images.image_inputs import ImageInputs, ImagePart, ImageTensors
from lean_finetune.memory.trace.alike_parts import KNOWN_VALUE
from lean_finetune.memory.trace.cached_fake_mode import CachedFakeMode
from lean_finetune.memory.trace.fake_batches import CPU, TEXT_ALONE, FakeBatches, Given
from lean_finetune.memory.trace.known_values import EXACT, ONE, KnownValuesMode
from lean_finetune.rows.attachment import Attachment
from lean_finetune.step.batches import Batch, BatchShape, empty_batch


class KnownImages(FakeBatches):
    """Makes a traced micro-batch's token ids and its arguments for images: integers with values, others without."""

    def __init__(self, inputs: ImageInputs, worst: Sizes = ()):
        """`inputs` makes the real ones; `worst` are the sizes of the images of the row with most patches."""
        self._inputs, self._worst = inputs, worst
        self._made: dict[Hashable, dict[str, tuple[torch.Size, torch.dtype, torch.Tensor | None]]] = {}

    @property
    def source(self) -> tuple[Hashable, ...]:
        """See the base class."""
        return self._inputs.processor, self._worst

    def mode(self) -> CachedFakeMode:
        """See the base class."""
        return KnownValuesMode()

    def with_rows(self, attached: Sequence[Attachment], trained: Sequence[Attachment]) -> FakeBatches:
        """See the base class."""
        images, known = images_of(attached), images_of(trained)
        if images is None or (known is not None and images.patches.max() <= known.patches.max()):
            return self
        return KnownImages(self._inputs, images.worst)

    def of_worst(self, shape: BatchShape) -> Given | None:
        """See the base class; rows of a shape without images have the worst row's."""
        if sizes_of(shape.attached) or not self._worst:
            return self.of(shape)
        return self.of(replace(shape, attached=(ImageShape(sizes=(self._worst,) * shape.rows),)))

    def of(self, shape: BatchShape) -> Given | None:
        """The fake tensors of a micro-batch, which a KnownValuesMode is active for; None without images."""
        sizes = sizes_of(shape.attached)
        if not any(sizes):
            return None

        def made() -> ImageTensors:
            ids_BT = torch.zeros(shape.rows, shape.length, dtype=torch.int64)
            return {**self._inputs.of_shapes(ids_BT, sizes), "": ids_BT}

        tensors = self._fake((shape.rows, shape.length, sizes), made)
        return tensors.pop(""), tensors

    def batch(self, shape: BatchShape, parts: int = 1) -> Batch:
        """See the base class."""
        beside = any(isinstance(one, ImageShape) and one.beside for one in shape.attached)
        if beside:
            blank = ImagePart(blank=self._fake("blank", lambda: self._inputs.blank))
            made = empty_batch(shape, CPU, parts)
            return replace(made, parts=(blank, *made.parts))
        return _shown(shape, self.of(shape), parts)

    def like_worst(self, shape: BatchShape, parts: int = 1) -> Batch:
        """See the base class."""
        return _shown(shape, self.of_worst(shape), parts)

    def _fake(self, key: Hashable, make: Callable[[], ImageTensors]) -> ImageTensors:
        """Fake tensors like those that `make` returns once for a key."""
        if key not in self._made:
            with _disable_current_modes():  # The trace would count these tensors.
                made = make()
                # The pixels themselves are not kept.
                self._made[key] = {
                    name: (value.shape, value.dtype, value if value.dtype in EXACT else None)
                    for name, value in made.items()
                }
                self._one = torch.ones(())
        tensors: ImageTensors = {}
        for name, (size, dtype, value) in self._made[key].items():
            tensors[name] = torch.empty(size, dtype=dtype)
            if value is not None:
                setattr(tensors[name], KNOWN_VALUE, value)
            elif self._inputs.drops_zeros:  # Pixels that are not zero.
                setattr(tensors[name], ONE, self._one)
        return tensors


def fakes_of(attached: Sequence[Attachment], directory: Path, config: PretrainedConfig) -> FakeBatches:
    """What makes the micro-batches of rows with these attachments, for a model in a directory.

    Raises:
        UserError: the model's files do not make its arguments.
    """
    images = images_of(attached)
    if images is None:
        return TEXT_ALONE
    return KnownImages(images.for_model(directory, config).known_inputs, images.worst)


def _shown(shape: BatchShape, given: Given | None, parts: int) -> Batch:
    """A micro-batch with what is given of it."""
    if given is None:
        return empty_batch(shape, CPU, parts)
    ids_BT, tensors = given
    return empty_batch(shape, CPU, parts, ids_BT, (ImagePart(shown=dict(tensors)),))
