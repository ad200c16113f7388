"""The model as the processes of one training step share it: the interface, and a single process without sharing."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import nn
from torch.nn.utils import get_total_norm

Result = TypeVar("Result")

NamedParameters = list[tuple[str, nn.Parameter]]


@dataclass(frozen=True, kw_only=True)
class ShardSlice:
    """Which rows of a trained parameter this process has."""

    first_row: int
    """Along the first dimension."""
    full_shape: tuple[int, ...]
    """Shape of the parameter."""
    saved_here: bool
    """Whether checkpoints take these rows from this process: of several that have the same rows, one saves them."""


class ParallelModel(Protocol):
    """A model and the processes that train it. Every process makes the same calls in the same order."""

    rank: int
    """This process, from 0."""
    size: int
    """Number of processes."""

    @property
    def model(self) -> nn.Module:
        """The model, whose weights may be sharded: compute with it in `run` alone."""

    @property
    def owned(self) -> nn.Module:
        """A module whose trained parameters are those that this process updates."""

    def run(self, compute: Callable[[nn.Module], Result]) -> Result:
        """Call `compute` with the model; sharded weights are gathered layer by layer while it runs."""

    def gradient_sync(self, *, last: bool) -> AbstractContextManager[object]:
        """The context of a micro-batch's backward; gradients need not be summed before the `last` one."""

    def trained_parameters(self) -> NamedParameters:
        """This process's share of the trained parameters; after a step's backward their gradients are global sums."""

    def slices(self) -> list[ShardSlice]:
        """Which rows of each of `trained_parameters` this process has."""

    def gradient_norm(self, gradients: Iterable[torch.Tensor], *, foreach: bool) -> torch.Tensor:
        """L2 norm of all gradients together; `gradients` are this process's share."""

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all processes."""

    def end_step(self, *, updated: bool) -> None:
        """Make the updated weights equal in all processes and free the gradients."""

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The trained parameters, each gathered when it is reached: keep one at a time, and iterate to the end."""


class SingleProcess:
    """A `ParallelModel` of one process."""

    rank, size = 0, 1

    def __init__(self, model: nn.Module):
        self.model = self.owned = model

    def run(self, compute: Callable[[nn.Module], Result]) -> Result:
        """See ParallelModel."""
        return compute(self.model)

    def gradient_sync(self, *, last: bool) -> AbstractContextManager[object]:
        """See ParallelModel."""
        return nullcontext()

    def trained_parameters(self) -> NamedParameters:
        """See ParallelModel."""
        return named_trained(self.model)

    def slices(self) -> list[ShardSlice]:
        """See ParallelModel."""
        shapes = (tuple(parameter.shape) for _, parameter in self.trained_parameters())
        return [ShardSlice(first_row=0, full_shape=shape, saved_here=True) for shape in shapes]

    def gradient_norm(self, gradients: Iterable[torch.Tensor], *, foreach: bool) -> torch.Tensor:
        """See ParallelModel."""
        return get_total_norm(list(gradients), foreach=foreach)

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """See ParallelModel."""
        return values

    def end_step(self, *, updated: bool) -> None:
        """See ParallelModel."""

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See ParallelModel."""
        return ((name, parameter.detach()) for name, parameter in self.trained_parameters())


def named_trained(model: nn.Module) -> NamedParameters:
    """The parameters that receive gradients, each once, in the model's order."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def losses_of_all_ranks(parallel: ParallelModel, losses: list[torch.Tensor]) -> list[torch.Tensor]:
    """The summed losses of all micro-batches of a step in the plan's order, from those of this process."""
    if parallel.size == 1:
        return losses
    by_micro_batch = torch.zeros(len(losses), parallel.size, dtype=losses[0].dtype, device=losses[0].device)
    by_micro_batch[:, parallel.rank] = torch.stack(losses)  # The others add 0: the sum loses no bit.
    return list(parallel.sum_over_ranks(by_micro_batch).flatten().unbind())
