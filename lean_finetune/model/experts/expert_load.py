"""How evenly the tokens of a step are spread over the experts of a mixture.

Each layer adds up its rows by expert on the device. Two figures are computed from them at the end of the step, so that
no layer waits for the device. Padding at the end of rows counts, because it is computed too.

Shape legend: E experts.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import torch
from torch import nn

ROWS = "_rows_by_expert"
"""Attribute of a module of experts: its rows by expert in this step, (E,), int32."""
_counting: ContextVar[Literal["off", "on", "idle"]] = ContextVar("counting", default="off")


@contextmanager
def counting_rows(*, idle: bool) -> Iterator[None]:
    """A context of a forward pass, in which experts count their rows; those of an `idle` micro-batch as zero.

    A layer that backward recomputes is outside of it, so it is counted once.
    """
    before = _counting.set("idle" if idle else "on")
    try:
        yield
    finally:
        _counting.reset(before)


def count_rows(module: Any, ends_E: torch.Tensor) -> None:
    """Add a micro-batch's rows by expert.

    Args:
        module: of experts.
        ends_E: rows up to the end of each expert.
    """
    if (counting := _counting.get()) == "off":
        return
    rows_E = torch.zeros_like(ends_E) if counting == "idle" else ends_E.diff(prepend=ends_E.new_zeros(1))
    before = getattr(module, ROWS, None)
    setattr(module, ROWS, rows_E if before is None else before + rows_E)


def forget_rows(model: nn.Module) -> None:
    """Start a step; an earlier one may have failed."""
    for module in model.modules():
        module.__dict__.pop(ROWS, None)


def expert_load(model: nn.Module, sum_over_ranks: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor | None:
    """The rows of the busiest expert relative to an even share (mean of the layers), and the share of idle experts.

    Args:
        model: after the forward passes of a step.
        sum_over_ranks: sums a tensor over all processes.

    Returns:
        Two values, fp32, on the device; None without experts.
    """
    counted = [module.__dict__.pop(ROWS) for module in model.modules() if ROWS in module.__dict__]
    if not counted:
        return None
    rows = sum_over_ranks(torch.cat(counted))
    layers = rows.split([len(rows_E) for rows_E in counted])
    busiest = torch.stack([rows_E.max() * len(rows_E) / rows_E.sum() for rows_E in layers])
    return torch.stack([busiest.mean(), (rows == 0).float().mean()])
