"""Leave a first, small micro-batch out of a trace: of its memory, gradients and a loss remain, and set no peak.

A step with several micro-batches reaches its peak in a later one, where gradients exist already. `fit` traces it as a
micro-batch of a few tokens and a full one. The small one takes as many operations as the full one. Here one operation
has its result: a loss, and in backward a gradient of every trained parameter.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from lean_finetune.memory.trace.alike_parts import PartsDiffer
from lean_finetune.patches.patch import replaced
from lean_finetune.step.batches import BatchShape
from lean_finetune.step.parallel_model import ParallelModel

FIRST = BatchShape(rows=1, length=8, supervised=7, packed_lengths=None)
"""A micro-batch so small that the next one sets the peak."""
LARGER = 8
"""Times the tokens of FIRST from which on the next one certainly does."""


def first_before(shape: BatchShape) -> BatchShape:
    """`FIRST` for the same kind of rows: as many as stay together, joined if those of `shape` are."""
    rows = shape.kind.unit
    if shape.packed_lengths is None:
        return replace(FIRST, rows=rows, supervised=rows * FIRST.supervised, kind=shape.kind)
    joined = (FIRST.length,) * rows
    return replace(
        FIRST, length=sum(joined), supervised=rows * FIRST.supervised, packed_lengths=joined, kind=shape.kind
    )


def leaves_gradients_alone(shapes: Sequence[BatchShape]) -> bool:
    """Whether the first of the micro-batches of a step is that of `first_before`, and the next ones are larger."""
    first, *later = shapes
    small = first == first_before(first)
    return small and bool(later) and all(s.rows * s.length >= LARGER * first.rows * first.length for s in later)


class _GradientsAlone(torch.autograd.Function):
    """A scalar whose backward gives a gradient of every parameter."""

    @staticmethod
    def forward(ctx: Any, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.parameters = parameters
        return torch.empty((), dtype=torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.empty_like(parameter) for parameter in ctx.parameters)


@contextmanager
def first_left_out(parallel: ParallelModel) -> Iterator[None]:
    """A context for a step: its first micro-batch runs as `_GradientsAlone`.

    Raises:
        PartsDiffer: at the end, if a later micro-batch gives a parameter no gradient. Then the first has none either.
    """
    parameters = [parameter for _, parameter in parallel.trained_parameters()]
    times = Counter[int]()
    hooks = [p.register_post_accumulate_grad_hook(lambda found: times.update([id(found)])) for p in parameters]
    run, started = parallel.run, False

    def run_or_leave_out(compute: Callable[[nn.Module], Any]) -> Any:
        nonlocal started
        if started:
            return run(compute)
        started = True
        return _GradientsAlone.apply(*parameters)

    try:
        with replaced(parallel, "run", run_or_leave_out):
            yield
    finally:
        for hook in hooks:
            hook.remove()
    if any(times[id(parameter)] < 2 for parameter in parameters):
        raise PartsDiffer
