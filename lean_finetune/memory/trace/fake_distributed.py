"""Simulate one process of a run on several GPUs on fake tensors."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from lean_finetune.distributed import fsdp, pipeline, replicated, sharding_modes
from lean_finetune.distributed.processes import World
from lean_finetune.distributed.sharding_modes import make_exchange, make_parallel
from lean_finetune.memory.trace.memory_trace import (
    GRADIENTS,
    SHARDING,
    MemoryTrace,
)
from lean_finetune.memory.trace.setting import Setting
from lean_finetune.patches import of_traces
from lean_finetune.patches.patch import replaced
from lean_finetune.step.parallel_model import (
    NamedParameters,
    ParallelModel,
    fullest_owner,
    local,
    named_trained,
)

# Simulate one process of a run on several GPUs (DDP, ZeRO-1, FSDP2, a pipeline) on fake tensors, in a fake group.
#
# PyTorch's own FSDP2 runs; what it allocates beside the model is counted as `sharding`. The module uses private
# PyTorch functions.
#
# A GPU's streams could keep memory in use that a CPU frees at once. FSDP2 keeps it by references instead of
# record_stream, and its code runs here: in forward, a layer's gathered buffer until the next layer is copied out
# (AllGatherState); in backward, the buffer of the layer to come, gathered while one computes, and the input of a
# reduction until the next one (ReduceScatterState). So the bytes of tensors are those of a GPU. Blocks are not: one
# that is freed serves only the stream on which it was allocated, which `following_streams` notes for the replay of
# reserved memory. No GPU has measured either yet.


@contextmanager
def fake_group(model: nn.Module, setting: Setting, trace: MemoryTrace, device: torch.device) -> Iterator[ParallelModel]:
    """Share the model among the processes of a fake group, as the process with the highest memory use sees it.

    Args:
        model: on fake tensors.
        setting: how many GPUs share the run, and how.
        trace: counts what sharing allocates.
        device: of the fake tensors.

    Raises:
        UserError: the GPUs cannot share the model so.
    """
    # Gives collectives their shape functions; slow to import.
    from torch.distributed._tools import fake_collectives  # noqa: F401

    world = _fullest(model, setting)
    dist.init_process_group("fake", store=FakeStore(), rank=world.rank, world_size=world.size)
    try:
        with ExitStack() as stack:
            away = setting.train.offload == "parameters"
            _patch(stack, trace, away=away)
            stack.enter_context(following_streams(trace))
            with trace, trace.on_host() if away else trace.allocating_as(SHARDING):
                if setting.local_shapes is None:
                    parallel = make_parallel(model, setting.train, world, device, stage_layers=setting.stage_layers)
                else:
                    parallel = _ShallowOwner(model, world, device, setting.local_shapes, trace)
                    parallel.exchange = make_exchange(setting.layout, None)
            yield parallel
    finally:
        dist.destroy_process_group()


def _fullest(model: nn.Module, setting: Setting) -> World:
    """The rank with the highest memory use: 0 gets the larger part of uneven shards; in zero1, the largest owner."""
    rank, gpus = setting.stage or 0, setting.gpus
    if setting.mode == "zero1" and setting.local_shapes is None:
        rank, _ = fullest_owner([parameter for _, parameter in named_trained(model)], gpus)
    return World(rank=rank, size=gpus, local_rank=rank, local_size=gpus)


class _ShallowOwner(replicated.ReplicatedModel):
    """A rank of zero1 with fewer layers than the run's model: it updates placeholders for the tensors it owns there.

    Placeholders and their gradients are not counted: the model's own parameters are.
    """

    def __init__(
        self,
        model: nn.Module,
        world: World,
        device: torch.device,
        owned: Sequence[tuple[torch.Size, torch.dtype]],
        trace: MemoryTrace,
    ):
        """Replicate `model`, and create placeholders of the shapes and types in `owned`."""
        super().__init__(model, world, device, owners=False)
        with trace.on_host():
            parts = [nn.Parameter(torch.empty(shape, dtype=dtype, device=device)) for shape, dtype in owned]
            self._summed = [torch.empty_like(part) for part in parts]
        trace.ignore((*parts, *self._summed))
        self.local_shard = nn.ParameterList(parts)

    def trained_parameters(self) -> NamedParameters:
        """See ParallelModel; gradients are reduced."""
        for part, gradient in zip(self.local_shard.parameters(), self._summed, strict=True):
            part.grad = gradient
        return super().trained_parameters()


def _patch(stack: ExitStack, trace: MemoryTrace, *, away: bool) -> None:
    """Patch PyTorch to read no values and to count what sharding allocates; `away`: shards are in host memory."""
    for module in (sharding_modes, fsdp, pipeline):  # The model is loaded, and there is one process.
        stack.enter_context(replaced(module, "check_same_shapes", lambda model, world, device: None))
        stack.enter_context(replaced(module, "broadcast_weights", lambda module, device: module))
    stack.enter_context(replaced(pipeline, "send_weights", lambda module, owner, world, device: None))
    stack.enter_context(of_traces.QUANT_STATE.during(set_quant_state))
    for patch, wrap in (
        (of_traces.SHARDED_SHAPES, partial(_uncounted, trace)),
        (of_traces.GATHERED_LAYERS, partial(_counted_as_sharding, trace)),
        (of_traces.REDUCED_GRADIENTS, partial(_counted_reduction, trace, away=away)),
    ):
        stack.enter_context(patch.during(*map(wrap, patch.originals())))
    if away:
        (parts,) = of_traces.SHARDS_ON_HOST.originals()
        sent = property(lambda param: [part.clone() for part in parts.fget(param)])
        stack.enter_context(of_traces.SHARDS_ON_HOST.during(sent))
        on_host = _acting_on_host(trace, fsdp.ShardedModel.after_gradient)
        stack.enter_context(replaced(fsdp.ShardedModel, "after_gradient", on_host))
    stack.enter_context(counting_resized(trace))


@contextmanager
def counting_resized(trace: MemoryTrace) -> Iterator[None]:
    """Count a storage again when its size changes: FSDP frees and allocates gathered layers this way."""
    (resize,) = of_traces.RESIZED.originals()

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        trace.resized(storage, SHARDING)
        return result

    with of_traces.RESIZED.during(resized):
        yield


@contextmanager
def following_streams(trace: MemoryTrace) -> Iterator[None]:
    """Note on which stream each block is allocated: FSDP selects streams on a CPU, too, where they mean nothing.

    Not measured on a GPU for this project's step.
    """
    default = torch.cpu.current_stream()
    numbers = {default: 0}

    @contextmanager
    def selected(stream: torch.cpu.Stream | None) -> Iterator[None]:
        current = torch.cpu.current_stream() if stream is None else stream
        with torch.cpu.StreamContext(stream), trace.on_stream(numbers.setdefault(current, len(numbers))):
            yield

    with of_traces.STREAMS.during(selected):
        yield


def set_quant_state(layer: Any) -> None:
    """Set a gathered 4-bit weight's scales; bitsandbytes would convert it to a class that fake tensors cannot have."""
    if getattr(layer.weight, "quant_state", None) is None:
        layer.weight.quant_state = layer.quant_state


def _uncounted(trace: MemoryTrace, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function whose allocations are not counted."""

    def uncounted(*args: Any, **kwargs: Any) -> Any:
        with trace.on_host():
            return function(*args, **kwargs)

    return uncounted


def _counted_as_sharding(trace: MemoryTrace, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function to count what it allocates as sharding."""

    def counted(*args: Any, **kwargs: Any) -> Any:
        with trace.allocating_as(SHARDING):
            return function(*args, **kwargs)

    return counted


def _counted_reduction(trace: MemoryTrace, reduce: Callable[..., Any], *, away: bool) -> Callable[..., Any]:
    """Wrap FSDP2's reduction, which turns whole gradients into shards; on the host if `away`."""

    def counted(params: list[Any], gradients: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        trace.register(gradients, GRADIENTS)
        with trace.allocating_as(SHARDING):
            result = reduce(params, gradients, *args, **kwargs)
        shards = [param.sharded_param.grad for param in params if param.sharded_param.grad is not None]
        if away:
            with trace.on_host():
                for gradient in shards:
                    gradient._local_tensor = gradient._local_tensor.clone()
            trace.ignore(local(gradient) for gradient in shards)
        else:
            trace.register((local(gradient) for gradient in shards), GRADIENTS)
        return result

    return counted


def _acting_on_host(trace: MemoryTrace, after_gradient: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `ShardedModel.after_gradient`, whose actions update weights in host memory."""

    def on_host(action: Callable[[], None]) -> None:
        with trace.on_host():
            action()

    return lambda parallel, parameter, action: after_gradient(parallel, parameter, partial(on_host, action))
