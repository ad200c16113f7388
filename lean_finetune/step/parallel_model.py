"""How the processes of a training step share the model."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from torch.utils.hooks import RemovableHandle

from lean_finetune.config.field_types import Method
from lean_finetune.config.parallel_layout import ParallelLayout
from lean_finetune.core.errors import UserError
from lean_finetune.model.attention.kernels import TokenExchange
from lean_finetune.step.batches import Batch

Result = TypeVar("Result")

READ_BY_EVERY_PROCESS: tuple[Method, ...] = ("int8_lora",)
"""Methods whose weights every process reads: 8-bit layers keep values outside of parameters and buffers."""

NamedParameters = list[tuple[str, nn.Parameter]]


@dataclass(frozen=True, kw_only=True)
class ShardSlice:
    """Which rows of a trained parameter this process has."""

    first_row: int
    """Along the first dimension."""
    full_shape: tuple[int, ...]
    """Shape of the parameter."""
    part: str = ""
    """Suffix of the parameter's name; with tensor parallelism `full_shape` is the shape of this part."""
    saved_here: bool
    """Whether checkpoints take these rows from this process: of several that have the same rows, one saves them."""


@dataclass(frozen=True, kw_only=True)
class WholeTensor:
    """A tensor that is sharded across processes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]
    """Gather it; all processes call this."""


class ParallelModel:
    """A model and the processes that train it; this base class is a single process.

    Every process makes the same calls in the same order.
    """

    def __init__(self, model: nn.Module, *, rank: int = 0, size: int = 1, layout: ParallelLayout | None = None):
        """`rank` is this process, from 0, of `size`. If weights are sharded, compute with `model` in `run` alone.

        `layout` is the layout of all processes; None = all train different rows.
        """
        self.model, self.rank, self.size = model, rank, size
        self.layout = layout or ParallelLayout(data=size)
        self.place = self.layout.coordinates(rank)
        self.exchange: TokenExchange | None = None
        """The exchange between processes that share each row's tokens; None if rows are complete."""
        self.local_shard = model
        """A module with the trained parameters that this process updates."""
        self.computes_loss = True
        """Whether `run` of a loss returns one: of a pipeline's stages, only the last does."""
        self.same_parameters = True
        """Whether all processes have the same trained parameters, or shards of them."""

    @property
    def seed_rank(self) -> int:
        """The process whose random numbers this one draws; tensor-parallel processes draw the same."""
        return self.rank - self.place.tensor

    def run(self, compute: Callable[[nn.Module], Result]) -> Result:
        """Call `compute` with the model; sharded weights are gathered layer by layer while it runs."""
        return compute(self.model)

    def forward_backward(
        self,
        batches: Iterable[Batch],
        forward: Callable[[Batch], torch.Tensor],
        backward: Callable[[torch.Tensor], None],
    ) -> None:
        """Run each micro-batch of a step: `forward` gives its loss, on which `backward` is called once."""
        for batch in batches:  # enumerate would keep a batch alive while the next one is made.
            loss = forward(batch)
            del batch  # Its memory is free in backward, and while the next one is made.
            backward(loss)
            del loss  # A loss keeps its graph alive.

    def gradient_sync(self, *, last: bool) -> AbstractContextManager[object]:
        """The context of a micro-batch's backward; gradients need not be summed before the `last` one."""
        return nullcontext()

    def trained_parameters(self) -> NamedParameters:
        """This process's share of the trained parameters; after a step's backward their gradients are global sums."""
        return self._found

    @cached_property
    def _found(self) -> NamedParameters:
        # The walk over the modules takes 10 ms for an 8B with adapters, in which a GPU would wait in every step.
        return named_trained(self.model)

    @cached_property
    def modules(self) -> tuple[nn.Module, ...]:
        """All modules of the model, found once: adapters and wrappers are added before training."""
        return tuple(self.model.modules())

    def after_gradient(self, parameter: nn.Parameter, action: Callable[[], None]) -> RemovableHandle:
        """Call `action` in backward as soon as `parameter`, one of `local_shard`, has its whole gradient."""
        return parameter.register_post_accumulate_grad_hook(lambda _: action())

    def slices(self) -> list[ShardSlice]:
        """Which rows of each of `trained_parameters` this process has."""
        shapes = (tuple(parameter.shape) for _, parameter in self.trained_parameters())
        return [ShardSlice(first_row=0, full_shape=shape, saved_here=True) for shape in shapes]

    def trained_shapes(self) -> dict[str, tuple[int, ...]]:
        """The complete shapes of the trained parameters of all processes, by name."""
        names = (name for name, _ in self.trained_parameters())
        return dict(zip(names, (rows.full_shape for rows in self.slices()), strict=True))

    def gradient_norm(self, gradients: Iterable[torch.Tensor], *, foreach: bool) -> torch.Tensor:
        """L2 norm of all gradients together; `gradients` are this process's share."""
        return get_total_norm(list(gradients), foreach=foreach)

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def losses_of_all_ranks(self, losses: list[torch.Tensor]) -> list[torch.Tensor]:
        """The summed losses of all micro-batches of a step in the plan's order, gathered from all processes."""
        if self.size == 1:
            return losses
        # A row's parts (context parallel) add up in one column, and stages of a pipeline but the last add 0.
        by_micro_batch = torch.zeros(len(losses), self.layout.data, dtype=losses[0].dtype, device=losses[0].device)
        if self.place.tensor == 0:  # The others add 0: the sum loses no bit.
            by_micro_batch[:, self.place.data] = torch.stack(losses)
        return list(self.sum_over_ranks(by_micro_batch).flatten().unbind())

    def end_step(self, *, updated: bool) -> None:
        """Make the updated weights equal in all processes, and free gradients that this one's optimizer does not."""

    def whole(self, name: str, tensor: torch.Tensor) -> "torch.Tensor | WholeTensor":
        """A tensor of the complete model's state dict; reading it is a collective call that gathers it."""
        return tensor

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The trained parameters, each gathered when it is reached: keep one at a time, and iterate to the end."""
        return ((name, parameter.detach()) for name, parameter in self.trained_parameters())

    def collect_weights(self) -> None:
        """Collect all weights of a fully trained model on the first process, if `model` has only a part of them."""


class OtherStage(nn.Module):
    """Placeholder for a module that another process has; returns its first argument."""

    def __init__(self, part: nn.Module):
        """`part` is the module that it replaces."""
        super().__init__()
        # The model's code may read plain attributes, such as a layer's type of attention.
        self.__dict__.update({name: value for name, value in vars(part).items() if isinstance(value, str | int)})

    def forward(self, hidden: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        """Return the first argument."""
        return hidden


def named_trained(model: nn.Module) -> NamedParameters:
    """The parameters that receive gradients, each once, in the model's order."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def assign_owners(sizes: list[int], count: int) -> list[int]:
    """The process that updates each tensor: largest first, each to the process with the least so far.

    Owners get complete tensors. So the update equals a single process's update bit for bit, even if an optimizer scales
    by blocks (8 bits) or by rows and columns (Adafactor). Raises UserError for fewer tensors than processes.
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


def layer_of(name: str) -> str:
    """The part of a parameter's name up to its layer's number; empty for parameters outside of layers."""
    found = re.match(r".*?\.\d+\.", name)
    return found[0] if found else ""


def fullest_owner(trained: Sequence[torch.Tensor], gpus: int) -> tuple[int, list[int]]:
    """zero1's rank that owns most, and the owner of each tensor."""
    sizes = [parameter.numel() for parameter in trained]
    owners = assign_owners(sizes, gpus)
    sizes_of = [sum(s for s, owner in zip(sizes, owners, strict=True) if owner == r) for r in range(gpus)]
    return sizes_of.index(max(sizes_of)), owners


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's shard of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def host_bytes(of_process: Mapping[str, int], method: Method, processes: int, node: int = 0) -> int:
    """RAM that the `processes` of a node need, without margins.

    `of_process` is what one needs after `imports`, for `loading` (rank 0 reads weights for all where it can) and for
    `training`, which begins once loading is over.
    """
    readers = processes if method in READ_BY_EVERY_PROCESS else int(node == 0)
    return processes * of_process["imports"] + max(readers * of_process["loading"], processes * of_process["training"])
