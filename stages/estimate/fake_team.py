"""The GPUs of a shared run, in one process: the team of `stages.dist` on fake tensors, in a group that sends nothing.

PyTorch's own DDP and FSDP2 run; what they make and free beside the model is told apart as `sharding`. The parts of
PyTorch that are not public are all in this file.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import bitsandbytes.nn.modules as bnb_modules
import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # noqa: F401 - gives collectives their shape functions
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore

from stages.dist import replicas, shards
from stages.dist.replicas import assign_owners
from stages.dist.shard import ShardSpec, make_team
from stages.dist.world import World
from stages.estimate.trace import ADAPTERS, GRADIENTS, OPTIMIZER, SHARDING, WEIGHTS, MemoryTrace
from stages.params import Params
from stages.params_sharing import CUTTING
from stages.step.team import Alone, Team, named_trained

CUT = {WEIGHTS, ADAPTERS, GRADIENTS, OPTIMIZER}
"""Categories of which each GPU holds a part, where weights are cut; scales of packed weights are whole."""
GATHERING = ("foreach_all_gather", "foreach_all_gather_copy_out")
"""What FSDP2 calls to make a layer whole; it reduces gradients by `foreach_reduce`."""


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """How several GPUs share a run."""

    spec: ShardSpec
    gpus: int
    several_turns: bool
    """Whether a step is more than one micro-batch on each GPU."""

    @classmethod
    def from_params(cls, params: Params, *, several_turns: bool) -> "Sharing | None":
        """Read hardware.num_gpus and what `train` says of sharing; None for one GPU."""
        found = cls(spec=ShardSpec.from_params(params), gpus=params.hardware.num_gpus, several_turns=several_turns)
        return found if found.gpus > 1 else None

    def holders_of(self, category: str) -> int:
        """GPUs among which a category of states is divided, once a backward is over."""
        if self.spec.mode == "zero1":
            return self.gpus if category == OPTIMIZER else 1
        return self.holders if category in CUT else 1

    @property
    def holders(self) -> int:
        """GPUs that hold one copy of the weights together."""
        return self.spec.group_gpus or self.gpus if self.spec.mode in CUTTING else 1

    @property
    def all_layers(self) -> str | None:
        """Why a few layers do not tell of all; None where they do."""
        return "zero1 deals out tensors by the sizes of all" if self.spec.mode == "zero1" else None


class _FixedReducer(dist.Reducer):
    """DDP's buckets as they are first made: to order them anew it reads values, and they stay as large in all."""

    def _rebuild_buckets(self) -> bool:
        return False


@contextmanager
def shared(model: nn.Module, sharing: Sharing | None, trace: MemoryTrace, device: torch.device) -> Iterator[Team]:
    """The team of a model while the block runs, as its fullest member sees it.

    Call under an active FakeTensorMode, before anything is held. What the team makes at once is held when this begins.

    Args:
        model: on fake tensors.
        sharing: how; None = one GPU.
        trace: follows what is made and freed.
        device: where the fake tensors are.

    Raises:
        UserError: the GPUs cannot be divided so.
    """
    if sharing is None:
        yield Alone(model)
        return
    world = _fullest(model, sharing)
    dist.init_process_group("fake", store=FakeStore(), rank=world.rank, world_size=world.size)
    try:
        with ExitStack() as stack:
            _patch(stack, trace)
            with trace, trace.making(SHARDING):
                team = make_team(model, world, sharing.spec, device)
            yield team
    finally:
        dist.destroy_process_group()


def _fullest(model: nn.Module, sharing: Sharing) -> World:
    """The member that holds most: the first gets the larger part of what does not divide; an owner the most state."""
    rank = 0
    if sharing.spec.mode == "zero1":
        sizes = [parameter.numel() for _, parameter in named_trained(model)]
        owners = assign_owners(sizes, sharing.gpus)
        held = [sum(s for s, owner in zip(sizes, owners, strict=True) if owner == r) for r in range(sharing.gpus)]
        rank = held.index(max(held))
    return World(rank=rank, size=sharing.gpus, local_rank=rank, local_size=sharing.gpus)


def _patch(stack: ExitStack, trace: MemoryTrace) -> None:
    """Have PyTorch read no values, and tell what it makes for sharing."""

    def put(target: Any, name: str, value: Any) -> None:
        stack.enter_context(patch.object(target, name, value))

    for team in (replicas, shards):  # Loading is over: the model is where it computes, and there is one member.
        put(team, "check_same_form", lambda model, world, device: None)
        put(team, "handed_out", lambda module, device: module)
    put(dist, "Reducer", _FixedReducer)
    put(bnb_modules, "fix_4bit_weight_quant_state_from_module", _name_scales)
    # Shapes of whole tensors, which DTensor works out on fake tensors of its own, are no memory.
    put(ShardingPropagator, "_fake_mode_lock", _Muted(trace))
    for name in GATHERING:
        put(_fsdp_param_group, name, _making(trace, getattr(_fsdp_collectives, name)))
    put(_fsdp_param_group, "foreach_reduce", _reducing(trace, _fsdp_collectives.foreach_reduce))
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> Any:  # FSDP2 gives a layer back, and takes it, this way.
        result = resize(storage, size)
        trace.resized(storage, SHARDING)
        return result

    put(torch.UntypedStorage, "resize_", resized)


def _name_scales(layer: Any) -> None:
    """Tell a whole 4-bit weight its scales; bitsandbytes makes it one of its own class, which no fake tensor can be."""
    if getattr(layer.weight, "quant_state", None) is None:
        layer.weight.quant_state = layer.quant_state


class _Muted:
    """In place of the lock that DTensor holds while it works out shapes."""

    def __init__(self, trace: MemoryTrace):
        self._trace, self._open = trace, ExitStack()

    def __enter__(self) -> None:
        self._open.enter_context(self._trace.elsewhere())

    def __exit__(self, *error: object) -> None:
        self._open.close()


def _making(trace: MemoryTrace, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, what it makes told as sharding."""

    def told(*args: Any, **kwargs: Any) -> Any:
        with trace.making(SHARDING):
            return function(*args, **kwargs)

    return told


def _reducing(trace: MemoryTrace, reduce: Callable[..., Any]) -> Callable[..., Any]:
    """FSDP2's reduction: it is handed whole gradients, and leaves parts of them."""

    def told(params: list[Any], gradients: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        trace.hold(gradients, GRADIENTS)
        with trace.making(SHARDING):
            result = reduce(params, gradients, *args, **kwargs)
        kept = (param.sharded_param.grad for param in params)
        trace.hold((local(gradient) for gradient in kept if gradient is not None), GRADIENTS)
        return result

    return told


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this member holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
