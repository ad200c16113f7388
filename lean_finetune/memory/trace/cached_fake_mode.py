"""FakeTensorMode with a quicker memory: what an operation made of tensors of some forms, it makes of others like them.

A trace asks for the same few hundred answers tens of thousands of times, and PyTorch's own cache takes longer to look
one up than most operations would to run; it knows nothing of operations of libraries either. A form is all that shape
functions see of a tensor. The parts of PyTorch that are not public are all in this file.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Arguments that are told apart by type and value; an operation with others is not remembered."""
Made = Callable[["QuickFakeMode", Sequence[FakeTensor]], Any]
"""Makes an operation's result again for a mode, from the tensors among its arguments."""


class NotRemembered(Exception):
    """Something about an operation is beyond what is told apart here."""


class QuickFakeMode(FakeTensorMode):
    """Fake tensors on the CPU. What is remembered holds no tensors, and serves all traces of a process."""

    _answers: ClassVar[dict[tuple, Made | None]] = {}

    def __init__(self) -> None:
        """With the answers that others found."""
        super().__init__(allow_non_fake_inputs=True)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here: saves what guards every operation against it."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence = (), kwargs: Mapping | None = None) -> Any:
        """The result of one operation."""
        try:
            key, tensors = asked(self, func, args, kwargs or {})
        except NotRemembered:
            return super().__torch_dispatch__(func, types, args, kwargs or {})
        made = self._answers.get(key)
        if made is not None:
            return made(self, tensors)
        out = super().__torch_dispatch__(func, types, args, kwargs or {})
        if key not in self._answers and out is not NotImplemented:
            self._answers[key] = self._remembered(key, func, args, kwargs or {}, tensors, out)
        return out

    def _remembered(
        self, key: tuple, func: Any, args: Sequence, kwargs: Mapping, tensors: Sequence[FakeTensor], out: Any
    ) -> Made | None:
        """How to make a result again; None where that cannot be told."""
        try:
            if func._schema.is_mutable and _changes_more(func, asked(self, func, args, kwargs)[0] != key):
                return None
            return making(out, tensors)
        except NotRemembered:
            return None


def _changes_more(func: OpOverload, form_changed: bool) -> bool:
    """Whether an operation that writes to an argument may change more of it than values."""
    return form_changed or func.namespace != "aten" or torch.Tag.inplace_view in func.tags


def asked(mode: FakeTensorMode, func: Any, args: Sequence, kwargs: Mapping) -> tuple[tuple, list[FakeTensor]]:
    """All that decides the result's form, and the tensors among the arguments.

    Raises:
        NotRemembered: there is more to it.
    """
    if type(func) is not OpOverload:
        raise NotRemembered
    key: list[Any] = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
    tensors: list[FakeTensor] = []
    _add(mode, args, key, tensors)
    if kwargs:
        key += kwargs
        _add(mode, kwargs.values(), key, tensors)
    return tuple(key), tensors


def _add(mode: FakeTensorMode, values: Any, key: list[Any], tensors: list[FakeTensor]) -> None:
    """Add arguments to a key."""
    key.append(len(values))
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            key.append(_form(mode, value))
            tensors.append(value)
        elif kind in PLAIN:
            key += (kind, value)
        elif kind is list or kind is tuple:
            key.append(kind)
            _add(mode, value, key, tensors)
        else:
            raise NotRemembered


def _form(mode: FakeTensorMode, tensor: FakeTensor) -> tuple:
    """What shape functions see of a tensor.

    Raises:
        NotRemembered: it is of no plain kind, or has a value.
    """
    if tensor.fake_mode is not mode or tensor.constant is not None or tensor.layout is not torch.strided:
        raise NotRemembered
    if tensor.dtype.is_complex or tensor.is_neg():
        raise NotRemembered
    return (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.fake_device)


def making(out: Any, tensors: Sequence[FakeTensor]) -> Made:
    """How to make a result again.

    Raises:
        NotRemembered: that cannot be told.
    """
    if isinstance(out, list | tuple):
        parts = [making(part, tensors) for part in out]
        storages = [part.untyped_storage()._cdata for part in out if isinstance(part, torch.Tensor)]
        if type(out) not in (list, tuple) or len(set(storages)) < len(storages):
            raise NotRemembered
        kind = type(out)
        return lambda mode, given: kind([part(mode, given) for part in parts])
    if not isinstance(out, torch.Tensor):
        if type(out) not in PLAIN:
            raise NotRemembered
        return lambda mode, given: out
    for place, tensor in enumerate(tensors):
        if tensor is out:
            return lambda mode, given: given[place]
    return _making_tensor(out, tensors)


def _making_tensor(out: torch.Tensor, tensors: Sequence[FakeTensor]) -> Made:
    """How to make a tensor again that is none of the arguments."""
    if type(out) is not FakeTensor or out.requires_grad:
        raise NotRemembered
    dtype, shape, strides, offset, device = _form(out.fake_mode, out)
    attributes = {name: value for name, value in vars(out).items() if name != "fake_mode"}
    storage = out.untyped_storage()
    base = next((place for place, each in enumerate(tensors) if each.untyped_storage()._cdata == storage._cdata), None)

    def empty() -> torch.Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device="meta")

    def view(given: Sequence[FakeTensor], base: int) -> torch.Tensor:
        nothing = torch.empty((0,), dtype=dtype, device="meta")
        return nothing.set_(given[base].untyped_storage(), offset, shape, strides)

    def faked(mode: QuickFakeMode, tensor: torch.Tensor) -> FakeTensor:
        fake = torch.Tensor._make_subclass(
            FakeTensor, tensor, False, dispatch_device=True, device_for_backend_keys=device
        )
        torch._C._set_throw_on_mutable_data_ptr(fake)
        vars(fake).update(attributes)
        fake.fake_mode = mode
        return fake

    if base is not None:
        return lambda mode, given: faked(mode, view(given, base))
    if offset or empty().untyped_storage().nbytes() != storage.nbytes():
        raise NotRemembered
    return lambda mode, given: faked(mode, empty())
