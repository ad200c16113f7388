"""The GPUs of a shared run, in one process: sharding as trained, on fake tensors and in a group that sends nothing.

PyTorch's own FSDP2 runs; what it makes and frees beside the model is told apart as `sharding`. The parts of
PyTorch that are not public are all in this file.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import bitsandbytes.nn.modules as bnb_modules
import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # noqa: F401 - gives collectives their shape functions
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param, _fsdp_param_group
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PretrainedConfig

from lean_finetune.config.schema import Params
from lean_finetune.config.sharding_rules import CUTTING
from lean_finetune.distributed import fsdp, replicated
from lean_finetune.distributed.forward_wrapper import LocalParameters
from lean_finetune.distributed.processes import World
from lean_finetune.distributed.replicated import assign_owners
from lean_finetune.distributed.sharding_modes import ShardSpec, make_parallel
from lean_finetune.memory.trace.memory_trace import ADAPTERS, GRADIENTS, OPTIMIZER, SHARDING, WEIGHTS, MemoryTrace
from lean_finetune.model.load_model import fake_model
from lean_finetune.model.model_spec import ModelSpec
from lean_finetune.step.parallel_model import NamedParameters, ParallelModel, SingleProcess, named_trained

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
    owned: tuple[tuple[torch.Size, torch.dtype], ...] | None = None
    """Mode zero1: what the fullest GPU updates, where the model that is traced is not the run's; None where it is."""

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

    def of_whole(self, config: PretrainedConfig, spec: ModelSpec) -> "Sharing":
        """For traces of the model with fewer layers: zero1 deals out tensors by the sizes of all.

        Raises:
            UserError: there are fewer of them than GPUs.
        """
        if self.spec.mode != "zero1":
            return self
        with FakeTensorMode(allow_non_fake_inputs=True):
            trained = [parameter for _, parameter in named_trained(fake_model(config, spec, torch.device("cpu")))]
        rank, owners = _fullest_owner(trained, self.gpus)
        mine = (parameter for parameter, owner in zip(trained, owners, strict=True) if owner == rank)
        return replace(self, owned=tuple((parameter.shape, parameter.dtype) for parameter in mine))


@contextmanager
def shared(
    model: nn.Module, sharing: Sharing | None, trace: MemoryTrace, device: torch.device
) -> Iterator[ParallelModel]:
    """The model as the process with the most memory shares it, for the length of the block.

    Call under an active FakeTensorMode, before anything is held. What sharing allocates is held when the block begins.

    Args:
        model: on fake tensors.
        sharing: how; None = one GPU.
        trace: follows what is made and freed.
        device: where the fake tensors are.

    Raises:
        UserError: the GPUs cannot be divided so.
    """
    if sharing is None:
        yield SingleProcess(model)
        return
    world = _fullest(model, sharing)
    dist.init_process_group("fake", store=FakeStore(), rank=world.rank, world_size=world.size)
    try:
        with ExitStack() as stack:
            away = sharing.spec.offload_weights
            _patch(stack, trace, away=away)
            with trace, trace.elsewhere() if away else trace.making(SHARDING):
                if sharing.owned is None:
                    parallel = make_parallel(model, world, sharing.spec, device)
                else:
                    parallel = _OwnerOfMore(model, world, device, sharing.owned, trace)
            yield parallel
    finally:
        dist.destroy_process_group()


def _fullest(model: nn.Module, sharing: Sharing) -> World:
    """The member that holds most: the first gets the larger part of what does not divide; an owner the most state."""
    rank = 0
    if sharing.spec.mode == "zero1" and sharing.owned is None:
        rank, _ = _fullest_owner([parameter for _, parameter in named_trained(model)], sharing.gpus)
    return World(rank=rank, size=sharing.gpus, local_rank=rank, local_size=sharing.gpus)


def _fullest_owner(trained: Sequence[torch.Tensor], gpus: int) -> tuple[int, list[int]]:
    """Of zero1's members, the one that owns most; and the owner of each tensor."""
    sizes = [parameter.numel() for parameter in trained]
    owners = assign_owners(sizes, gpus)
    held = [sum(s for s, owner in zip(sizes, owners, strict=True) if owner == r) for r in range(gpus)]
    return held.index(max(held)), owners


class _OwnerOfMore(replicated.ReplicatedModel):
    """A member of zero1 whose model has fewer layers than the run's: it updates stand-ins for what it owns there.

    These and their gradients count for nothing: the model's own are counted, and its layers stand for all.
    """

    def __init__(
        self,
        model: nn.Module,
        world: World,
        device: torch.device,
        owned: Sequence[tuple[torch.Size, torch.dtype]],
        trace: MemoryTrace,
    ):
        """Put `model` beside the others, and stand-ins of these shapes and types beside it."""
        super().__init__(model, world, device, owners=False)
        with trace.elsewhere():
            parts = [nn.Parameter(torch.empty(shape, dtype=dtype, device=device)) for shape, dtype in owned]
            self._summed = [torch.empty_like(part) for part in parts]
        trace.leave_out((*parts, *self._summed))
        self.owned = LocalParameters(parts)

    def trained_parameters(self) -> NamedParameters:
        """See ParallelModel: gradients have been summed."""
        for part, gradient in zip(self.owned.parameters(), self._summed, strict=True):
            part.grad = gradient
        return super().trained_parameters()


def _patch(stack: ExitStack, trace: MemoryTrace, *, away: bool) -> None:
    """Have PyTorch read no values, and tell what it makes for sharing; `away`: parts are in the host's memory."""

    def put(target: Any, name: str, value: Any) -> None:
        stack.enter_context(patch.object(target, name, value))

    for module in (replicated, fsdp):  # Loading is over: the model is where it computes, and there is one member.
        put(module, "check_same_shapes", lambda model, world, device: None)
        put(module, "broadcast_weights", lambda module, device: module)
    put(bnb_modules, "fix_4bit_weight_quant_state_from_module", _name_scales)
    # Shapes of whole tensors, which DTensor works out on fake tensors of its own, are no memory.
    put(ShardingPropagator, "_fake_mode_lock", _Muted(trace))
    for name in GATHERING:
        put(_fsdp_param_group, name, _making(trace, getattr(_fsdp_collectives, name)))
    put(_fsdp_param_group, "foreach_reduce", _reducing(trace, _fsdp_collectives.foreach_reduce, away=away))
    if away:  # From a CPU to itself nothing is copied.
        parts = vars(_fsdp_param.FSDPParam)["all_gather_inputs"].fget
        sent = property(lambda param: [part.clone() for part in parts(param)])
        put(_fsdp_param.FSDPParam, "all_gather_inputs", sent)
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


def _reducing(trace: MemoryTrace, reduce: Callable[..., Any], *, away: bool) -> Callable[..., Any]:
    """FSDP2's reduction: it is handed whole gradients, and leaves parts of them, on the host where they are `away`."""

    def told(params: list[Any], gradients: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        trace.hold(gradients, GRADIENTS)
        with trace.making(SHARDING):
            result = reduce(params, gradients, *args, **kwargs)
        kept = [param.sharded_param.grad for param in params if param.sharded_param.grad is not None]
        if away:
            with trace.elsewhere():
                for gradient in kept:
                    gradient._local_tensor = gradient._local_tensor.clone()
            trace.leave_out(local(gradient) for gradient in kept)
        else:
            trace.hold((local(gradient) for gradient in kept), GRADIENTS)
        return result

    return told


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this member holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
