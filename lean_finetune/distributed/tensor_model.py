"""Tensor parallelism (train.tensor_parallel) around any way of sharing weights (train.sharding)."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from lean_finetune.distributed.replicated import sum_gradients
from lean_finetune.distributed.tensor_shards import TensorShards
from lean_finetune.step.data_parallel import DataParallelModel, NamedParameters, Result, ShardSlice, WholeTensor


class TensorParallelModel(DataParallelModel):
    """A `DataParallelModel` in which each process has parts of weights; `inner` shards or replicates these parts."""

    def __init__(self, inner: DataParallelModel, shards: TensorShards):
        """`inner` shards or replicates this process's parts among the processes that have the same parts."""
        super().__init__(inner.model, rank=inner.rank, size=inner.size, layout=inner.layout)
        self._inner, self._shards, self.owned = inner, shards, inner.owned

    def run(self, compute: Callable[[nn.Module], Result]) -> Result:
        """See DataParallelModel."""
        return self._inner.run(compute)

    @contextmanager
    def gradient_sync(self, *, last: bool) -> Iterator[None]:
        """See DataParallelModel."""
        with self._inner.gradient_sync(last=last):
            yield
        if last:
            trained = self._inner.trained_parameters()
            sum_gradients([(n, p) for n, p in trained if n in self._shards.partial and p.numel()], self._shards.group)

    def trained_parameters(self) -> NamedParameters:
        """See DataParallelModel."""
        return self._inner.trained_parameters()

    def slices(self) -> list[ShardSlice]:
        """See DataParallelModel: a divided parameter is saved under a name of this part."""
        first = self.place.tensor == 0
        return [
            replace(piece, part=f"@{self.place.tensor}/{self.layout.tensor}")
            if name in self._shards.parts
            else replace(piece, saved_here=piece.saved_here and first)
            for (name, _), piece in zip(self.trained_parameters(), self._inner.slices(), strict=True)
        ]

    def gradient_norm(self, gradients: Iterable[torch.Tensor], *, foreach: bool) -> torch.Tensor:
        """See DataParallelModel: gradients of undivided weights count once."""
        own = {id(p.grad) for name, p in self.trained_parameters() if name in self._shards.parts}
        parts: dict[bool, list[torch.Tensor]] = {True: [], False: []}
        for gradient in gradients:
            parts[id(gradient) in own].append(gradient)
        squared = self._inner.gradient_norm(parts[True], foreach=foreach).float().square()
        dist.all_reduce(squared, group=self._shards.group)
        if any(name not in self._shards.parts for name, _ in self.trained_parameters()):
            squared += self._inner.gradient_norm(parts[False], foreach=foreach).float().square()
        return squared.sqrt()

    def end_step(self, *, updated: bool) -> None:
        """See DataParallelModel."""
        self._inner.end_step(updated=updated)

    def whole(self, name: str, tensor: torch.Tensor) -> torch.Tensor | WholeTensor:
        """See DataParallelModel."""
        if (part := self._shards.parts.get(name)) is None:
            return tensor

        def read() -> torch.Tensor:
            return self._shards.gather(name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)

        return WholeTensor(dtype=tensor.dtype, shape=part.full_shape, read=read)

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See DataParallelModel."""
        return ((name, self._shards.gather(name, part)) for name, part in self._inner.full_parameters())
