"""The processes that share a training step, as the step sees them; a process on its own is a team of one."""

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
class Piece:
    """Which rows of a trained parameter a process holds, and who keeps them."""

    first: int
    """Of its rows, that is along the first dimension."""
    whole: tuple[int, ...]
    """Shape of the parameter."""
    kept_here: bool
    """Whether checkpoints take them from this process: of several that hold the same, from one."""


class Team(Protocol):
    """Who computes, who holds which weights, and who updates them. Every member makes the same calls in order."""

    rank: int
    """Which member this process is, from 0."""
    size: int
    """How many there are."""

    @property
    def model(self) -> nn.Module:
        """The model, of whose weights this process may hold a part: compute with it in `run` alone."""

    @property
    def mine(self) -> nn.Module:
        """Its trained parameters are what this process updates, or its part of each."""

    def run(self, compute: Callable[[nn.Module], Result]) -> Result:
        """Call `compute` with the model, whose weights are whole while it runs, layer by layer."""

    def turn(self, *, last: bool) -> AbstractContextManager[object]:
        """The context of a micro-batch's backward; gradients need not be summed before the `last` one."""

    def trained(self) -> NamedParameters:
        """What this process holds of the trained parameters; after a step's backward, with gradients of all members."""

    def pieces(self) -> list[Piece]:
        """What of each of `trained` this process holds."""

    def norm(self, gradients: Iterable[torch.Tensor], *, foreach: bool) -> torch.Tensor:
        """L2 norm of all gradients together, of which this process holds `gradients`."""

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all members."""

    def finish(self, *, updated: bool) -> None:
        """End the step: weights are alike everywhere, and gradients are let go."""

    def whole(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The trained parameters whole, one after the other: hold one at a time, and take them all."""


class Alone:
    """A process on its own."""

    rank, size = 0, 1

    def __init__(self, model: nn.Module):
        """Train `model`."""
        self.model = self.mine = model

    def run(self, compute: Callable[[nn.Module], Result]) -> Result:
        """See Team."""
        return compute(self.model)

    def turn(self, *, last: bool) -> AbstractContextManager[object]:
        """See Team."""
        return nullcontext()

    def trained(self) -> NamedParameters:
        """See Team."""
        return named_trained(self.model)

    def pieces(self) -> list[Piece]:
        """See Team."""
        return [Piece(first=0, whole=tuple(p.shape), kept_here=True) for _, p in self.trained()]

    def norm(self, gradients: Iterable[torch.Tensor], *, foreach: bool) -> torch.Tensor:
        """See Team."""
        return get_total_norm(list(gradients), foreach=foreach)

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """See Team."""
        return values

    def finish(self, *, updated: bool) -> None:
        """See Team."""

    def whole(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See Team."""
        return ((name, parameter.detach()) for name, parameter in self.trained())


def named_trained(model: nn.Module) -> NamedParameters:
    """The parameters that receive gradients, each once, in the model's order."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def losses_of_all(team: Team, losses: list[torch.Tensor]) -> list[torch.Tensor]:
    """The summed losses of all micro-batches of a step, in the plan's order, from those of this process."""
    if team.size == 1:
        return losses
    by_turn = torch.zeros(len(losses), team.size, dtype=losses[0].dtype, device=losses[0].device)
    by_turn[:, team.rank] = torch.stack(losses)  # What others add to it is 0: the sum loses no bit.
    return list(team.total(by_turn).flatten().unbind())
