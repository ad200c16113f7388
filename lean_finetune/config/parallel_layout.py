"""How the processes of a run, one per GPU, divide its work: the sizes of the dimensions of their mesh."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

Dimension = Literal["pipeline", "data", "context", "tensor"]
ORDER: tuple[Dimension, ...] = ("pipeline", "data", "context", "tensor")
"""Dimensions of the mesh; ranks count the last one fastest, so its processes are on one node where they fit."""


class Coordinates(NamedTuple):
    """The place of a process in the mesh: its index in each dimension."""

    pipeline: int
    data: int
    context: int
    tensor: int


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """Sizes of the mesh's dimensions; their product is the number of processes.

    `train.sharding` says how the data × context processes of equal other coordinates share weights and sum gradients.
    """

    data: int
    """Processes that train different rows: the plan's ranks."""
    context: int = 1
    """Processes that each compute a part of every row's tokens."""
    tensor: int = 1
    """Processes that each compute a part of every matmul."""
    pipeline: int = 1
    """Processes that each compute some of the layers, one after the other."""

    @classmethod
    def of(cls, gpus: int, context: int, tensor: int, pipeline: int) -> "ParallelLayout":
        """The mesh of so many GPUs; dimension `data` is what the others leave."""
        return cls(data=gpus // (context * tensor * pipeline), context=context, tensor=tensor, pipeline=pipeline)

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.pipeline * self.data * self.context * self.tensor

    @property
    def sharing(self) -> int:
        """Processes that share weights by `train.sharding`, and sum gradients."""
        return self.data * self.context

    def coordinates(self, rank: int) -> Coordinates:
        """The place of a process."""
        return Coordinates(*(int(index) for index in np.unravel_index(rank, self._shape)))

    def groups(self, *dimensions: Dimension) -> list[list[int]]:
        """The ranks in groups whose members differ in these dimensions alone, in the order of ranks."""
        ranks = np.arange(self.size).reshape(self._shape)
        axes = [ORDER.index(dimension) for dimension in ORDER if dimension in dimensions]
        members = int(np.prod([self._shape[axis] for axis in axes]))
        found: list[list[int]] = np.moveaxis(ranks, axes, range(-len(axes), 0)).reshape(-1, members).tolist()
        return found

    @property
    def _shape(self) -> tuple[int, ...]:
        return tuple(getattr(self, dimension) for dimension in ORDER)
