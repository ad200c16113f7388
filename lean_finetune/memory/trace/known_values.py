"""A fake mode that knows the values of small integers, which decide how image towers divide their patches.

A tower reads the sizes of its images: it splits patches into windows and images, and repeats positions. So tensors
of integers that follow from those sizes keep a real copy beside the fake one, and an operation on such tensors alone
runs on the copies too. Other tensors stay without values.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map
from transformers import PretrainedConfig

from lean_finetune.images.attachment import ImageShape, Sizes, images_of, sizes_of
from lean_finetune.images.image_inputs import ImageInputs, ImagePart, ImageTensors
from lean_finetune.memory.trace.alike_parts import KNOWN_VALUE
from lean_finetune.memory.trace.cached_fake_mode import MISSING, CachedFakeMode
from lean_finetune.memory.trace.fake_batches import CPU, TEXT_ALONE, FakeBatches, Given
from lean_finetune.patches.of_traces import KNOWN_LISTS
from lean_finetune.rows.attachment import Attachment
from lean_finetune.step.batches import Batch, BatchShape, empty_batch

aten = torch.ops.aten
ONE = "one_value"
"""Attribute of a fake tensor of other types: the value that it has throughout."""
EXACT = (torch.bool, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
"""Types whose values are kept."""
MOST_BYTES = 1 << 28
"""Larger results have no values."""
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
"""Operations whose second argument are indices, which may be masks."""
REPEATED = {aten.view.default, aten._to_copy.default, aten.eq.Scalar}
"""Operations that make a tensor with one value throughout of another."""
SHARES = {aten._to_copy.default, aten.div.Tensor}
"""Operations whose results keep values in other types too: a pooling of patches asks which of its weights are 0."""
RANDOM = torch.Tag.nondeterministic_seeded


class KnownValuesMode(CachedFakeMode):
    """Fake tensors, of which those of integers may have values."""

    def known(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor with the values of a real one."""
        fake = self.from_tensor(tensor)
        setattr(fake, KNOWN_VALUE, tensor)
        return fake

    def known_result(self, func: Any, args: Sequence, kwargs: Mapping) -> Any:
        """As of any fake mode, for operations whose results have no values."""
        tensors = _tensors((*args, *kwargs.values()))
        return MISSING if not tensors or any(map(_knows, tensors)) else super().known_result(func, args, kwargs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence = (), kwargs: Mapping | None = None) -> Any:
        """The result of one operation, with values if all tensors that it reads have them."""
        kwargs = kwargs or {}
        if func in REPEATED and hasattr(args[0], ONE):
            return self._repeated(func, types, args, kwargs)
        tensors = _tensors((*args, *kwargs.values()))
        known = [each for each in tensors if _is_known(each)]
        if func in INDEXED and not _is_known(args[0]):
            args = (args[0], self._as_numbers(args[1]), *args[2:])
        elif tensors and len(known) < len(tensors):
            if known and func._schema.is_mutable and any(each is args[0] for each in known):
                raise NotImplementedError(f"{func} writes values that are not known into a tensor of known ones")
        elif known or (not tensors and _is_deterministic(func)):
            return self._with_values(func, types, args, kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _repeated(self, func: Any, types: Any, args: Sequence, kwargs: Mapping) -> Any:
        """The result of an operation on a tensor that has one value throughout."""
        out = super().__torch_dispatch__(func, types, args, kwargs)
        one = getattr(args[0], ONE)
        with unset_fake_temporarily():
            made = one if func is aten.view.default else func(one, *args[1:], **kwargs)
            if made.dtype in EXACT:
                setattr(out, KNOWN_VALUE, made.expand(out.shape))
            else:
                setattr(out, ONE, made)
        return out

    def _with_values(self, func: Any, types: Any, args: Sequence, kwargs: Mapping) -> Any:
        """The result of an operation that reads known values alone."""
        out = None
        if not _depends_on_values(func):
            out = super().__torch_dispatch__(func, types, args, kwargs)
            if any(made.nbytes > MOST_BYTES for made in _tensors((out,))):
                return out  # A mask of long rows, which nothing reads, would take as much memory here.
        with unset_fake_temporarily():
            real = func(*_real(args), **dict(zip(kwargs, _real(kwargs.values()), strict=True)))
        if out is None:
            return tree_map(lambda each: self.known(each) if isinstance(each, torch.Tensor) else each, real)
        for made, value in zip(_tensors((out,)), _tensors((real,)), strict=True):
            if type(made) is FakeTensor and (value.dtype in EXACT or func in SHARES):
                setattr(made, KNOWN_VALUE, value)
        return out

    def _as_numbers(self, indices: Sequence[Any]) -> list[Any]:
        """Indices with masks of known values as the positions where they are true: their number decides shapes."""
        found: list[Any] = []
        for index in indices:
            if not isinstance(index, FakeTensor) or not _is_known(index) or index.dtype != torch.bool:
                found.append(index)
                continue
            with unset_fake_temporarily():
                places = getattr(index, KNOWN_VALUE).nonzero().unbind(1)
            found += [self.known(place.contiguous()) for place in places]
        return found


@contextmanager
def known_lists() -> Iterator[None]:
    """A context in which `tolist` of known values reads all at once: towers list the bounds of their windows."""
    listed = FakeTensor.tolist

    def tolist(tensor: FakeTensor) -> Any:
        if (known := _value(tensor)) is None:
            return listed(tensor)
        with _disable_current_modes():
            return known.tolist()

    with KNOWN_LISTS.during(tolist):
        yield


class KnownImages(FakeBatches):
    """Makes a traced micro-batch's token ids and its arguments for images: integers with values, others without."""

    def __init__(self, inputs: ImageInputs, worst: Sizes = ()):
        """`inputs` makes the real ones; `worst` are the sizes of the images of the row with most patches."""
        self._inputs, self._worst = inputs, worst
        self._made: dict[Hashable, dict[str, tuple[torch.Size, torch.dtype, torch.Tensor | None]]] = {}

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


def _is_known(value: Any) -> bool:
    return _value(value) is not None


def _knows(value: Any) -> bool:
    """Whether something is known of a tensor's values."""
    return _is_known(value) or hasattr(value, ONE)


def _value(value: Any) -> torch.Tensor | None:
    """The values of a tensor, which a real one of integers has itself; None for any other."""
    if type(value) is FakeTensor:
        return getattr(value, KNOWN_VALUE, None)
    is_real = type(value) is torch.Tensor and value.dtype in EXACT and value.device.type != "meta"
    return value if is_real else None


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among values and in their lists. Operations have no other nesting, and a tree walk takes longer."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found


def _real(values: Iterable[Any]) -> list[Any]:
    """Arguments with the values of tensors in the place of fake tensors."""
    return [
        _real(each) if type(each) in (list, tuple) else each if (v := _value(each)) is None else v for each in values
    ]


def _is_deterministic(func: Any) -> bool:
    """Whether the values of an operation without tensors follow from its arguments: `arange`, not `rand` or `empty`."""
    return RANDOM not in func.tags and "empty" not in func._schema.name


def _depends_on_values(func: Any) -> bool:
    """Whether the values of the arguments decide the shape of the result, or the result is a number."""
    return bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags))
