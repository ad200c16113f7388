"""Data parallelism with all weights in every process (train.sharding ddp and zero1)."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lean_finetune.config.parallel_layout import ParallelLayout
from lean_finetune.core.errors import UserError
from lean_finetune.distributed.gradient_reduction import GradientReducer
from lean_finetune.distributed.processes import World
from lean_finetune.step.data_parallel import DataParallelModel, ShardSlice, named_trained


class ReplicatedModel(DataParallelModel):
    """A `DataParallelModel` whose processes all have the same weights and the same summed gradients."""

    def __init__(
        self,
        model: nn.Module,
        world: World,
        device: torch.device,
        *,
        owners: bool,
        layout: ParallelLayout | None = None,
        group: dist.ProcessGroup | None = None,
    ):
        """`model` has the same weights in every process of `group` (None = all).

        With `owners`, one process updates each tensor, keeps its optimizer state alone and sends the result to the
        others (stage 1 of Rajbhandari et al. 2020, arXiv 1910.02054).

        Raises:
            UserError: there are fewer trained tensors than owners.
        """
        super().__init__(model, rank=world.rank, size=world.size, layout=layout)
        self._trained = named_trained(model)
        self._reducer = GradientReducer(self._trained, group)
        self._owners = assign_owners([p.numel() for _, p in self._trained], world.size) if owners else None
        if self._owners is not None:
            pairs = zip(self._trained, self._owners, strict=True)
            self.owned = nn.ParameterList([p for (_, p), owner in pairs if owner == world.rank])

    def gradient_sync(self, *, last: bool) -> AbstractContextManager[object]:
        """See DataParallelModel."""
        return self._reducer.reducing() if last else nullcontext()

    def slices(self) -> list[ShardSlice]:
        """See DataParallelModel: owners save what they own; without owners, processes save tensors in turn."""
        index = self.place.data * self.layout.context + self.place.context
        savers = self._owners or [number % self.layout.sharing for number in range(len(self._trained))]
        return [
            ShardSlice(first_row=0, full_shape=tuple(p.shape), saved_here=saver == index)
            for (_, p), saver in zip(self._trained, savers, strict=True)
        ]

    def end_step(self, *, updated: bool) -> None:
        """See DataParallelModel."""
        if updated and self._owners is not None:
            pairs = zip(self._trained, self._owners, strict=True)
            sends: list[Any] = [dist.broadcast(p.detach(), src=owner, async_op=True) for (_, p), owner in pairs]
            for send in sends:
                send.wait()
        for _, parameter in self._trained:
            parameter.grad = None


def assign_owners(sizes: list[int], count: int) -> list[int]:
    """The process that updates each tensor: largest first, each to the process with the least so far.

    Owners get complete tensors. So the update equals that of a single process bit for bit, also where an optimizer
    scales by blocks (8 bits) or by rows and columns (Adafactor). Raises UserError for fewer tensors than processes.
    """
    if len(sizes) < count:
        raise UserError(
            f"train.sharding: zero1 gives each GPU whole tensors to update; got {len(sizes)} trained tensors for "
            f"{count} GPUs; use ddp"
        )
    load = [0] * count
    owners = [0] * len(sizes)
    for tensor in sorted(range(len(sizes)), key=lambda number: (-sizes[number], number)):
        owner = min(range(count), key=lambda process: (load[process], process))
        owners[tensor], load[owner] = owner, load[owner] + sizes[tensor]
    return owners
