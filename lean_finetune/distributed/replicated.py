"""Every process holds all weights (train.sharding ddp and zero1); gradients are summed as backward makes them."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import get_total_norm

from lean_finetune.core.errors import UserError
from lean_finetune.distributed.forward_wrapper import Parts
from lean_finetune.distributed.gradient_reduction import GradientSums
from lean_finetune.distributed.processes import World
from lean_finetune.distributed.weight_broadcast import check_same_form, handed_out
from lean_finetune.step.process_group import NamedParameters, Piece, Result, named_trained


class Replicas:
    """A team (lean_finetune.step.process_group) of equals: same weights, same summed gradients."""

    def __init__(self, model: nn.Module, world: World, device: torch.device, *, owners: bool):
        """Put `model` beside the others.

        Args:
            model: of the same form in every process, with the weights of the first one.
            world: which process this is.
            device: where it is.
            owners: each tensor is updated by one process, which alone holds its optimizer state, and sent to the
                others (stage 1 of Rajbhandari et al. 2020, arXiv 1910.02054).

        Raises:
            UserError: there are fewer trained tensors than owners.
        """
        self.rank, self.size, self.model = world.rank, world.size, model
        self._trained = named_trained(model)
        check_same_form(model, world, device)
        handed_out(model, device)
        self._sums = GradientSums(self._trained)
        self._owners = assign_owners([p.numel() for _, p in self._trained], world.size) if owners else None
        self.mine: nn.Module = model
        if self._owners is not None:
            pairs = zip(self._trained, self._owners, strict=True)
            self.mine = Parts([p for (_, p), owner in pairs if owner == world.rank])

    def run(self, compute: Callable[[nn.Module], Result]) -> Result:
        """See Team."""
        return compute(self.model)

    def turn(self, *, last: bool) -> AbstractContextManager[object]:
        """See Team."""
        return self._sums.sent() if last else nullcontext()

    def trained(self) -> NamedParameters:
        """See Team."""
        return self._trained

    def pieces(self) -> list[Piece]:
        """See Team: owners keep what they own, else each keeps every so many-th."""
        keepers = self._owners or [number % self.size for number in range(len(self._trained))]
        return [
            Piece(first=0, whole=tuple(p.shape), kept_here=keeper == self.rank)
            for (_, p), keeper in zip(self._trained, keepers, strict=True)
        ]

    def norm(self, gradients: Iterable[torch.Tensor], *, foreach: bool) -> torch.Tensor:
        """See Team: every process holds all gradients."""
        return get_total_norm(list(gradients), foreach=foreach)

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """See Team."""
        dist.all_reduce(values)
        return values

    def finish(self, *, updated: bool) -> None:
        """See Team."""
        if updated and self._owners is not None:
            pairs = zip(self._trained, self._owners, strict=True)
            sent: list[Any] = [dist.broadcast(p.detach(), src=owner, async_op=True) for (_, p), owner in pairs]
            for work in sent:
                work.wait()
        for _, parameter in self._trained:
            parameter.grad = None

    def whole(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See Team."""
        return ((name, parameter.detach()) for name, parameter in self._trained)


def assign_owners(sizes: list[int], count: int) -> list[int]:
    """The process that updates each tensor: the largest first, each to the one that has least so far.

    Whole tensors, so that the update is bit for bit the one of a single process with every optimizer: also of those
    that scale by blocks (8 bits) or by rows and columns (Adafactor).

    Raises:
        UserError: there are fewer tensors than processes.
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
