"""Data parallelism with all weights in every process (train.sharding ddp and zero1), and gradient reduction.

Each gradient is summed over all processes as soon as the step's last backward has computed it. This needs less memory
than PyTorch's DDP, whose buckets exist for the whole run, in addition to the gradients of earlier micro-batches. Here
a gradient exists once, and none exists in forward.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import groupby
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from lean_finetune.config.parallel_layout import ParallelLayout
from lean_finetune.core.errors import UserError
from lean_finetune.distributed.processes import World
from lean_finetune.islands.tower import TOWER
from lean_finetune.step.parallel_model import (
    NamedParameters,
    ParallelModel,
    ShardSlice,
    assign_owners,
    layer_of,
    named_trained,
)

PACKED_BYTES = 2**20
"""A layer's gradients up to this size share a bucket: at 50 GB/s, 1 MiB takes about as long as the launch."""


class ReplicatedModel(ParallelModel):
    """A `ParallelModel` whose processes all have the same weights and the same summed gradients."""

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
            self.local_shard = nn.ParameterList([p for (_, p), owner in pairs if owner == world.rank])

    def gradient_sync(self, *, last: bool) -> AbstractContextManager[object]:
        """See ParallelModel."""
        # Earlier micro-batches add to the same gradients, so one sum in a step is enough.
        return self._reducer.reducing() if last else nullcontext()

    def slices(self) -> list[ShardSlice]:
        """See ParallelModel: owners save what they own; without owners, processes save tensors in turn."""
        index = self.place.data * self.layout.context + self.place.context
        savers = self._owners or [number % self.layout.sharing for number in range(len(self._trained))]
        return [
            ShardSlice(first_row=0, full_shape=tuple(p.shape), saved_here=saver == index)
            for (_, p), saver in zip(self._trained, savers, strict=True)
        ]

    def end_step(self, *, updated: bool) -> None:
        """See ParallelModel."""
        if updated and self._owners is not None:
            pairs = zip(self._trained, self._owners, strict=True)
            sends: list[Any] = [dist.broadcast(p.detach(), src=owner, async_op=True) for (_, p), owner in pairs]
            for send in sends:
                send.wait()
        # Of all tensors: the optimizer has freed the gradients of its own ones alone.
        for _, parameter in self._trained:
            parameter.grad = None


class GradientReducer:
    """Starts all-reduces from backward hooks, in the same order in every process whatever the order of backward."""

    def __init__(self, trained: NamedParameters, group: dist.ProcessGroup | None = None):
        """Register hooks on `trained`, which is in the model's order; `group`: the processes, None = all."""
        self._buckets = [_Bucket(parameters, group) for parameters in gradient_buckets(trained)]
        self._unsent: deque[_Bucket] = deque()
        self._works: list[dist.Work] = []
        for bucket in self._buckets:
            for _, parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(partial(self._gradient_ready, bucket))

    @contextmanager
    def reducing(self) -> Iterator[None]:
        """A context for the step's last backward; after it, gradients are sums over all processes.

        Raises:
            UserError: a trained parameter has no gradient.
        """
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)
        self._unsent.extend(self._buckets)
        try:
            yield
            while self._unsent:  # Gradients that only earlier backwards reached.
                self._send_first()
            for work in self._works:
                work.wait()
        finally:
            self._unsent.clear()
            self._works.clear()

    def _gradient_ready(self, bucket: "_Bucket", parameter: torch.Tensor) -> None:
        """Backward has computed a gradient: send every bucket whose turn has come."""
        bucket.missing -= 1
        while self._unsent and not self._unsent[0].missing:
            self._send_first()

    def _send_first(self) -> None:
        if (work := self._unsent.popleft().send()) is not None:
            self._works.append(work)


class _Bucket:
    """Parameters of one type whose gradients are sent together."""

    def __init__(self, parameters: NamedParameters, group: dist.ProcessGroup | None):
        self.parameters = parameters
        self.missing = 0
        self._group = group

    def send(self) -> dist.Work | None:
        """Start the all-reduce: of a single gradient in place, of several in a tensor of which they become views.

        None if there is no gradient: in a step of text, of the parts beside the decoder.

        Raises:
            UserError: a gradient is missing.
        """
        reached = [parameter for _, parameter in self.parameters if parameter.grad is not None]
        for name, parameter in self.parameters:
            if parameter.grad is None and not TOWER.is_beside(name):
                raise UserError(
                    f"train.sharding: ddp and zero1 sum the gradients of all trained tensors; {name} got none in this "
                    "step; set hardware.num_gpus=1, or adapt other modules (train.lora.targets)"
                )
        if not reached:
            return None
        gradients = [cast(torch.Tensor, parameter.grad) for parameter in reached]
        # Flat views in memory order; autograd gives a gradient the strides of its parameter.
        flat = [gradient.as_strided((gradient.numel(),), (1,)) for gradient in gradients]
        sent = flat[0] if len(flat) == 1 else torch.cat(flat)
        if len(flat) > 1:
            packed = sent.split([part.numel() for part in flat])
            for parameter, gradient, part in zip(reached, gradients, packed, strict=True):
                parameter.grad = part.as_strided(gradient.shape, gradient.stride())
        work = dist.all_reduce(sent, group=self._group, async_op=True)
        assert work is not None
        return work


def sum_gradients(trained: NamedParameters, group: dist.ProcessGroup) -> None:
    """Sum gradients over a group after backward; raises UserError if one is missing."""
    for parameters in gradient_buckets(trained):
        if (work := _Bucket(parameters, group).send()) is not None:
            work.wait()


def gradient_buckets(trained: NamedParameters) -> Iterator[NamedParameters]:
    """Parameters grouped into buckets, about in the order of backward: the last layer first."""
    for _, layer in groupby(reversed(trained), key=lambda named: layer_of(named[0])):
        small: dict[torch.dtype, NamedParameters] = {}
        for name, parameter in layer:
            if parameter.nbytes > PACKED_BYTES:
                yield [(name, parameter)]
            else:
                small.setdefault(parameter.dtype, []).append((name, parameter))
        yield from small.values()
