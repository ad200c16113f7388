"""Fake tensors as a trace needs them: fast, with autograd's in-place sums, and with errors for people."""

import logging
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from packaging.version import parse
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.autograd.graph import _engine_run_backward
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PretrainedConfig, __version__

from lean_finetune.core.errors import UserError

DEPEND_ON_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
"""Raised where code reads a value, or where the shape of a result depends on values: the tokens of one expert."""
UNTRACEABLE = (UnsupportedFakeTensorException, UnsupportedOperatorException, NotImplementedError)
"""Raised for operations without a shape function."""
UNREAD_LAYERDROP = "5.23.0"
"""Release of transformers whose OPT draws no random number for a `layerdrop` of 0; 5.17.0 compares it."""
TRACE, PACKAGE = Path(__file__).parent, Path(__file__).parents[2]


@contextmanager
def refuse_untraceable(config: PretrainedConfig) -> Iterator[None]:
    """Refuse a model whose step cannot be traced, or whose own code fails.

    Raises:
        UserError: names the error and its place in the model's code.
    """
    torch_log = logging.getLogger("torch._subclasses.fake_tensor")
    level = torch_log.level
    torch_log.setLevel(logging.CRITICAL)  # It writes the traceback of every error, also of those refused below.
    try:
        yield
    except UserError:
        raise
    except DEPEND_ON_VALUES as error:
        raise UserError(
            f"model.name: the step of {config.model_type} reads values of tensors ({_place_in_model(error)}: {error}), "
            f"which do not exist before training, so its memory is not known; {_remedy(config)}"
        ) from None
    except UNTRACEABLE as error:
        raise UserError(
            f"model.name: the step of {config.model_type} cannot be traced ({type(error).__name__}: {error}), so its "
            "memory is not known; choose another model"
        ) from None
    except Exception as error:
        if (place := _place_in_model(error)) is None:
            raise
        raise UserError(
            f"model.name: {config.model_type} cannot be trained with these settings: its code fails ({place}: "
            f"{type(error).__name__}: {error}); choose another model or another train.method"
        ) from None
    finally:
        torch_log.setLevel(level)


def _remedy(config: PretrainedConfig) -> str:
    """Another model, or the release of transformers that computes this one without reading values."""
    if getattr(config, "layerdrop", None) == 0 and parse(__version__) < parse(UNREAD_LAYERDROP):
        return f"install transformers {UNREAD_LAYERDROP} ({__version__} here), or choose another model"
    return "choose another model"


def _place_in_model(error: Exception) -> str | None:
    """File and line in transformers' model code that raised an error; None if our code did."""
    place = None
    for frame in traceback.extract_tb(error.__traceback__):
        if place is not None and Path(frame.filename).is_relative_to(TRACE):  # The model's code called it.
            break
        if "/transformers/models/" in frame.filename:
            place = f"{Path(frame.filename).name}:{frame.lineno}"
        elif Path(frame.filename).is_relative_to(PACKAGE):
            place = None
    return place


# Emulate autograd's in-place gradient accumulation, which it skips for tensor subclasses such as fake tensors.
#
# - The engine adds two gradients of one tensor into the first, if nothing else refers to it or its storage
# (torch/csrc/autograd/input_buffer.cpp).
# - The gradient of an index operation, of a maximum along a dimension or of the largest values is written into the
# zeros it starts from (torch/csrc/autograd/FunctionsManual.cpp).
#
# Without this a trace would count one tensor too many in each case. The module uses private PyTorch functions.

aten = torch.ops.aten
IN_PLACE = {
    aten.add.Tensor: aten.add_.Tensor,
    aten.index_add.default: aten.index_add_.default,
    aten.index_put.default: aten.index_put_.default,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter_add.default: aten.scatter_add_.default,
}
"""Out-of-place operations, and the in-place ones that run for plain tensors."""
WRITERS = {
    aten.index_add.default: {"IndexSelectBackward0"},
    aten.index_put.default: {"IndexBackward0"},
    aten.scatter.src: {"MaxBackward0", "SortBackward0", "TopkBackward0"},
    aten.scatter_add.default: {"GatherBackward0"},
}
"""Autograd nodes that write these operations into new zeros."""


def in_place_version(operation: Any, args: Sequence[Any]) -> Any:
    """The operation that would run for plain tensors: one of `IN_PLACE`, or `operation` itself.

    Call it directly from `__torch_dispatch__`: calls from the C++ engine are recognised by the absence of Python frames
    between the engine and the mode.
    """
    if torch.is_grad_enabled() or sys._getframe(2).f_code is not _engine_run_backward.__code__:
        return operation
    nodes = WRITERS.get(operation)
    in_place = _accumulates(args) if nodes is None else type(torch._C._current_autograd_node()).__name__ in nodes
    return IN_PLACE[operation] if in_place else operation


def _accumulates(args: Sequence[Any]) -> bool:
    """Whether an addition sums gradients into the memory of the first."""
    if len(args) != 2 or not all(type(each) is FakeTensor for each in args):
        return False
    first, second = args
    alike = (first.shape, first.dtype) == (second.shape, second.dtype)
    return alike and _uses(first) == sole_owner_uses() and _dense(first)


def _uses(tensor: torch.Tensor) -> tuple[int, int]:
    """References to a tensor and to its storage."""
    return tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # type: ignore[attr-defined]


@cache
def sole_owner_uses() -> tuple[int, int]:
    """References to a gradient that only the engine owns, including the references of the measuring call.

    Measured rather than stated, as the number may differ between PyTorch versions. Call first outside of any trace.
    """
    found: list[tuple[int, int]] = []

    class Probe(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Sequence = (), kwargs: Mapping | None = None) -> Any:
            if func is aten.add.Tensor and not torch.is_grad_enabled():
                found.append(_uses(args[0]))
            return func(*args, **(kwargs or {}))

    with FakeTensorMode(), torch.enable_grad():
        weight = torch.ones(2, requires_grad=True)
        total = (weight * 2 + weight * 3).sum()
        with Probe():
            total.backward()
    (uses,) = found  # The sum of its two gradients.
    return uses


def _dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values are non-overlapping and dense in memory."""
    step = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


# A FakeTensorMode with a fast cache of results, by operation and metadata of its arguments.
#
# A trace repeats a few hundred calls tens of thousands of times. PyTorch's own cache is slower than most operations,
# and does not cover operations of libraries. The module uses private PyTorch functions.

PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Arguments that are part of the cache key by type and value; calls with other arguments are not cached."""
Recipe = Callable[["CachedFakeMode", Sequence[FakeTensor]], Any]
"""Recreates an operation's result for a mode, from the tensors among its arguments."""
UNDECLARED_VIEWS = (torch.ops.aten._unsafe_view.default, torch.ops.aten.lift.default)
"""Operations whose result shares memory with an argument, though their schema does not say so."""
MISSING = object()
"""Stands for a result that the cache does not have."""


class NotCacheable(Exception):
    """The cache key does not cover a property of the call."""


class CachedFakeMode(FakeTensorMode):
    """Fake tensors on the CPU. The cache keeps no tensors and is shared by all traces of a process."""

    _recipes: ClassVar[dict[tuple, Recipe | None]] = {}

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.cache_enabled = False  # PyTorch's own cache, which takes longer than most operations.

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

    def known_result(self, func: Any, args: Sequence, kwargs: Mapping) -> Any:
        """The result of an operation if the cache has it, else MISSING: without PyTorch's dispatcher, so twice as fast.

        For the mode above this one, in place of calling the operation.
        """
        try:
            key, tensors = cache_key(self, func, args, kwargs)
        except NotCacheable:
            return MISSING
        made = self._recipes.get(key)
        if made is None:
            return MISSING
        with torch._C._DisableTorchDispatch():  # As inside of this mode, the tensors created are no fake ones yet.
            return made(self, tensors)

    def _recipe(
        self, key: tuple, func: Any, args: Sequence, kwargs: Mapping, tensors: Sequence[FakeTensor], out: Any
    ) -> Recipe | None:
        """How to recreate a result; None if the call is not cacheable."""
        try:
            if func._schema.is_mutable and _changes_more(func, cache_key(self, func, args, kwargs)[0] != key):
                return None
            if _makes_new_memory(func) and _storages(tensors) & _storages(
                out if isinstance(out, list | tuple) else (out,)
            ):
                return None  # Another view that its schema does not declare.
            return recipe_of(out, tensors)
        except NotCacheable:
            return None


def _storages(values: Sequence[Any]) -> set[int]:
    """The memory of the tensors among values."""
    return {value.untyped_storage()._cdata for value in values if isinstance(value, torch.Tensor)}


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
    if not _makes_new_memory(func):
        key += [tensor.storage_offset() for tensor in tensors]
    return tuple(key), tensors


@cache
def _makes_new_memory(func: OpOverload) -> bool:
    """Whether a result has memory of its own: then it is the same wherever the arguments begin in theirs.

    A tower may call attention a thousand times, on parts of the same tensors.
    """
    schema = func._schema
    aliases = schema.is_mutable or any(returned.alias_info is not None for returned in schema.returns)
    return func.namespace == "aten" and not aliases and func not in UNDECLARED_VIEWS


def _extend_key(mode: FakeTensorMode, values: Any, key: list[Any], tensors: list[FakeTensor]) -> None:
    """Append arguments to a key, without where tensors begin in their memory."""
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
    """What shape functions see of a tensor, without its offset.

    Raises:
        NotCacheable: the tensor is not a plain strided one, or has a value.
    """
    if tensor.fake_mode is not mode or tensor.constant is not None or tensor.layout is not torch.strided:
        raise NotCacheable
    if tensor.dtype.is_complex or tensor.is_neg():
        raise NotCacheable
    return (tensor.dtype, tensor.shape, tensor.stride(), tensor.fake_device)


def recipe_of(out: Any, tensors: Sequence[FakeTensor]) -> Recipe:
    """How to recreate a result.

    Raises:
        NotCacheable: it cannot be recreated from metadata.
    """
    if isinstance(out, list | tuple):
        parts = [recipe_of(part, tensors) for part in out]
        given = _storages(tensors)  # Views share the storage of an argument.
        made = [found for part in out for found in _storages((part,)) if found not in given]
        if type(out) not in (list, tuple) or len(set(made)) < len(made):
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
    (dtype, shape, strides, device), offset = _metadata(out.fake_mode, out), out.storage_offset()
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
