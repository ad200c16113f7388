"""Sums of gradients over all processes, each sent as soon as the step's last backward has made it.

Until then gradients are those of a process on its own, and after it they are still held once. PyTorch's DDP sends
buckets that it keeps for the whole run: they would be there beside the gradients of all micro-batches but the last,
and in forward, where a process on its own holds none.
"""

import re
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import groupby

import torch
import torch.distributed as dist

from lean_finetune.core.errors import UserError
from lean_finetune.step.parallel_model import NamedParameters

PACKED_BYTES = 2**20
"""A layer's gradients up to this size travel together: at 50 GB/s one of 1 MiB takes about as long as its start."""


class GradientReducer:
    """Has backward send gradients. Messages leave every process in the same order, whatever backward's is."""

    def __init__(self, trained: NamedParameters):
        """Watch the gradients of `trained`, in the model's order."""
        self._messages = [_Bucket(parts) for parts in gradient_buckets(trained)]
        self._unsent: deque[_Bucket] = deque()
        self._works: list[dist.Work] = []
        for message in self._messages:
            for _, parameter in message.parts:
                parameter.register_post_accumulate_grad_hook(partial(self._made, message))

    @contextmanager
    def reducing(self) -> Iterator[None]:
        """Inside is the step's last backward; behind it, gradients are those of all processes.

        Raises:
            UserError: a trained parameter has no gradient.
        """
        for message in self._messages:
            message.missing = len(message.parts)
        self._unsent.extend(self._messages)
        try:
            yield
            while self._unsent:  # This backward did not reach all that earlier ones did.
                self._works.append(self._unsent.popleft().send())
            for work in self._works:
                work.wait()
        finally:
            self._unsent.clear()
            self._works.clear()

    def _made(self, message: "_Bucket", parameter: torch.Tensor) -> None:
        """Backward has added to a gradient: if it is the last one, send what can be sent."""
        message.missing -= 1
        while self._unsent and not self._unsent[0].missing:
            self._works.append(self._unsent.popleft().send())


class _Bucket:
    """Gradients that are sent together."""

    def __init__(self, parts: NamedParameters):
        """Of these parameters, all of one type."""
        self.parts = parts
        self.missing = 0

    def send(self) -> dist.Work:
        """Begin to sum: a single gradient where it is, several in a tensor of which they become parts.

        Raises:
            UserError: a gradient is not there.
        """
        gradients = [self._gradient(name, parameter) for name, parameter in self.parts]
        flat = [_as_stored(gradient) for gradient in gradients]
        sent = flat[0] if len(flat) == 1 else torch.cat(flat)
        if len(flat) > 1:
            packed = sent.split([part.numel() for part in flat])
            for (_, parameter), gradient, part in zip(self.parts, gradients, packed, strict=True):
                parameter.grad = part.as_strided(gradient.shape, gradient.stride())
        work = dist.all_reduce(sent, async_op=True)
        assert work is not None
        return work

    def _gradient(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """The gradient of a parameter."""
        if parameter.grad is None:
            raise UserError(
                f"train.sharding: ddp and zero1 sum the gradients of all trained tensors; {name} got none in this "
                "step; set hardware.num_gpus=1, or adapt other modules (train.lora.targets)"
            )
        return parameter.grad


def gradient_buckets(trained: NamedParameters) -> Iterator[NamedParameters]:
    """Parameters whose gradients are sent together, about in the order of backward: those of the last layer first."""
    for _, layer in groupby(reversed(trained), key=lambda named: _layer(named[0])):
        small: dict[torch.dtype, NamedParameters] = {}
        for name, parameter in layer:
            if parameter.nbytes > PACKED_BYTES:
                yield [(name, parameter)]
            else:
                small.setdefault(parameter.dtype, []).append((name, parameter))
        yield from small.values()


def _layer(name: str) -> str:
    """What the names of a layer's parameters have in common: all up to its number; of others, nothing."""
    found = re.match(r".*?\.\d+\.", name)
    return found[0] if found else ""


def _as_stored(tensor: torch.Tensor) -> torch.Tensor:
    """All values in the order in which they lie in memory; autograd gives a gradient the strides of its parameter."""
    return tensor.as_strided((tensor.numel(),), (1,))
