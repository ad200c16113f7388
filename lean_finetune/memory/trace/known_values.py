"""A fake mode that knows the values of small integers, by which towers beside a decoder divide what they get.

A tower reads sizes: it splits its patches into windows, and repeats positions. So tensors of integers that follow
from those sizes keep a real copy beside the fake one, and an operation on such tensors alone runs on the copies too.
Other tensors stay without values.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from lean_finetune.memory.trace.alike_parts import KNOWN_VALUE
from lean_finetune.memory.trace.cached_fake_mode import MISSING, CachedFakeMode
from lean_finetune.patches.of_traces import KNOWN_LISTS

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
