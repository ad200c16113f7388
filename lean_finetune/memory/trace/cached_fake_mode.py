"""A FakeTensorMode with a fast cache of results, by operation and metadata of its arguments.

A trace repeats a few hundred calls tens of thousands of times. PyTorch's own cache is slower than most operations, and
does not cover operations of libraries. The module uses private PyTorch functions.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Arguments that are part of the cache key by type and value; calls with other arguments are not cached."""
Recipe = Callable[["CachedFakeMode", Sequence[FakeTensor]], Any]
"""Recreates an operation's result for a mode, from the tensors among its arguments."""


class NotCacheable(Exception):
    """The cache key does not cover a property of the call."""


class CachedFakeMode(FakeTensorMode):
    """Fake tensors on the CPU. The cache keeps no tensors and is shared by all traces of a process."""

    _recipes: ClassVar[dict[tuple, Recipe | None]] = {}

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, so skip PyTorch's check on every operation."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence = (), kwargs: Mapping | None = None) -> Any:
        """The result of one operation."""
        if func is torch.ops.aten.split.Tensor and not args[0].numel():
            func, args = _without_split_size(*args, **(kwargs or {}))
            kwargs = None
        try:
            key, tensors = cache_key(self, func, args, kwargs or {})
        except NotCacheable:
            return super().__torch_dispatch__(func, types, args, kwargs or {})
        made = self._recipes.get(key)
        if made is not None:
            return made(self, tensors)
        out = super().__torch_dispatch__(func, types, args, kwargs or {})
        if key not in self._recipes and out is not NotImplemented:
            self._recipes[key] = self._recipe(key, func, args, kwargs or {}, tensors, out)
        return out

    def _recipe(
        self, key: tuple, func: Any, args: Sequence, kwargs: Mapping, tensors: Sequence[FakeTensor], out: Any
    ) -> Recipe | None:
        """How to recreate a result; None if the call is not cacheable."""
        try:
            if func._schema.is_mutable and _changes_more(func, cache_key(self, func, args, kwargs)[0] != key):
                return None
            return recipe_of(out, tensors)
        except NotCacheable:
            return None


def _without_split_size(tensor: torch.Tensor, size: int, dim: int = 0) -> tuple[OpOverload, tuple]:
    """The same as aten.split.Tensor for a tensor without values: torch 2.11 ends with an IndexError in its own."""
    length = tensor.shape[dim]
    sizes = [min(size, length - start) for start in range(0, length, max(1, size))] or [0]
    return torch.ops.aten.split_with_sizes.default, (tensor, sizes, dim)


def _changes_more(func: OpOverload, metadata_changed: bool) -> bool:
    """Whether an operation that writes to an argument may change its metadata too."""
    return metadata_changed or func.namespace != "aten" or torch.Tag.inplace_view in func.tags


def cache_key(mode: FakeTensorMode, func: Any, args: Sequence, kwargs: Mapping) -> tuple[tuple, list[FakeTensor]]:
    """Everything that determines the result's metadata, and the tensors among the arguments.

    Raises:
        NotCacheable: the result depends on more.
    """
    if type(func) is not OpOverload:
        raise NotCacheable
    key: list[Any] = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
    tensors: list[FakeTensor] = []
    _extend_key(mode, args, key, tensors)
    if kwargs:
        key += kwargs
        _extend_key(mode, kwargs.values(), key, tensors)
    return tuple(key), tensors


def _extend_key(mode: FakeTensorMode, values: Any, key: list[Any], tensors: list[FakeTensor]) -> None:
    """Append arguments to a key."""
    key.append(len(values))
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            key.append(_metadata(mode, value))
            tensors.append(value)
        elif kind in PLAIN:
            key += (kind, value)
        elif kind is list or kind is tuple:
            key.append(kind)
            _extend_key(mode, value, key, tensors)
        else:
            raise NotCacheable


def _metadata(mode: FakeTensorMode, tensor: FakeTensor) -> tuple:
    """What shape functions see of a tensor.

    Raises:
        NotCacheable: the tensor is not a plain strided one, or has a value.
    """
    if tensor.fake_mode is not mode or tensor.constant is not None or tensor.layout is not torch.strided:
        raise NotCacheable
    if tensor.dtype.is_complex or tensor.is_neg():
        raise NotCacheable
    return (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.fake_device)


def recipe_of(out: Any, tensors: Sequence[FakeTensor]) -> Recipe:
    """How to recreate a result.

    Raises:
        NotCacheable: it cannot be recreated from metadata.
    """
    if isinstance(out, list | tuple):
        parts = [recipe_of(part, tensors) for part in out]
        storages = [part.untyped_storage()._cdata for part in out if isinstance(part, torch.Tensor)]
        if type(out) not in (list, tuple) or len(set(storages)) < len(storages):
            raise NotCacheable
        kind = type(out)
        return lambda mode, given: kind([part(mode, given) for part in parts])
    if not isinstance(out, torch.Tensor):
        if type(out) not in PLAIN:
            raise NotCacheable
        return lambda mode, given: out
    for place, tensor in enumerate(tensors):
        if tensor is out:
            return lambda mode, given: given[place]
    return _tensor_recipe(out, tensors)


def _tensor_recipe(out: torch.Tensor, tensors: Sequence[FakeTensor]) -> Recipe:
    """How to recreate a tensor that is none of the arguments."""
    if type(out) is not FakeTensor or out.requires_grad:
        raise NotCacheable
    dtype, shape, strides, offset, device = _metadata(out.fake_mode, out)
    attributes = {name: value for name, value in vars(out).items() if name != "fake_mode"}
    storage = out.untyped_storage()
    base = next((place for place, each in enumerate(tensors) if each.untyped_storage()._cdata == storage._cdata), None)

    def empty() -> torch.Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device="meta")

    def view(given: Sequence[FakeTensor], base: int) -> torch.Tensor:
        nothing = torch.empty((0,), dtype=dtype, device="meta")
        return nothing.set_(given[base].untyped_storage(), offset, shape, strides)

    def faked(mode: CachedFakeMode, tensor: torch.Tensor) -> FakeTensor:
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
        raise NotCacheable
    return lambda mode, given: faked(mode, empty())
