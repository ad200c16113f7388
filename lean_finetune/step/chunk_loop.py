"""Work on parts of tensors, one after another. A trace of memory skips most of the parts: they are alike."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")
"""A tensor, or None."""
Parts = Sequence[tuple[torch.Tensor, ...]]
Loop = Callable[[Callable[..., Any], Parts], list[Any]]


def run_all(work: Callable[..., Result], parts: Parts) -> list[Result]:
    """The results of all parts, in order."""
    return [work(*part) for part in parts]


_loop: ContextVar[Loop] = ContextVar("loop", default=run_all)


def in_parts(work: Callable[..., Result], parts: Parts) -> list[Result]:
    """The results of `work` on the tensors of each part, in order. `work` keeps no memory but its result."""
    return _loop.get()(work, parts)


@contextmanager
def looping_by(loop: Loop) -> Iterator[None]:
    """A context in which `loop` runs the work on the parts."""
    token = _loop.set(loop)
    try:
        yield
    finally:
        _loop.reset(token)
