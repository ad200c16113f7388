"""The model whose step is traced: shared among its GPUs, and the memory that exists before the first step."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lean_finetune.config.schema import Train
from lean_finetune.memory.trace.memory_trace import (
    ACTIVATIONS,
    ADAPTERS,
    GRADIENTS,
    OPTIMIZER,
    QUANTISATION_STATE,
    WEIGHTS,
    MemoryTrace,
)
from lean_finetune.memory.trace.setting import Setting
from lean_finetune.model.quantize import quantisation_tensors
from lean_finetune.patches.of_traces import RNG_STATE
from lean_finetune.pinning.adapter_files import LORA
from lean_finetune.step.parallel_model import ParallelModel, local, named_trained
from lean_finetune.step.run_optimizer import device_state

FP32 = torch.float32


@contextmanager
def shared(model: nn.Module, setting: Setting, trace: MemoryTrace, device: torch.device) -> Iterator[ParallelModel]:
    """Distribute the model, as the process with the highest memory use sees it.

    Call under an active FakeTensorMode, before anything is registered. Arguments and errors as of `fake_group`.
    """
    if not setting.distributed:
        yield ParallelModel(model)
        return
    from lean_finetune.memory.trace.fake_distributed import fake_group  # Here: one GPU needs no process group.

    with fake_group(model, setting, trace, device) as parallel:
        yield parallel


def register_state(
    trace: MemoryTrace,
    parallel: ParallelModel,
    optimizer: torch.optim.Optimizer,
    train: Train,
    *,
    cuda: bool,
    weights_on_host: bool = False,
) -> None:
    """Register weights, adapters and optimizer state; gradients when backward creates them.

    `weights_on_host`: sharded parameters and their update are in host memory.
    """
    model = parallel.model
    trained = [parameter for _, parameter in named_trained(model)]
    if weights_on_host:
        trace.ignore(local(tensor) for tensor in model.parameters() if isinstance(tensor, DTensor))
    trace.register([local(tensor) for tensor in (*model.parameters(), *model.buffers())], WEIGHTS)
    trace.register(quantisation_tensors(model), QUANTISATION_STATE)
    if weights_on_host:  # So are their gradients and update.
        return
    if train.method != "full":
        trace.register([local(tensor) for tensor in trained], ADAPTERS)
        if train.lora.changes_frozen_weights and not cuda:  # In host memory, which counts only on a CPU.
            matrices = [local(one) for name, one in named_trained(model) if LORA in name and one.dim() == 2]
            trace.register_bytes(sum(one.numel() * FP32.itemsize for one in matrices), ADAPTERS)
    trace.register(device_state(optimizer, train.optimizer, cuda=cuda), OPTIMIZER)

    def register_gradient(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        trace.register([local(parameter.grad)], GRADIENTS)

    for parameter in trained:
        if not isinstance(parameter, DTensor):  # FSDP's gradients are registered in its reduction.
            parameter.register_post_accumulate_grad_hook(register_gradient)


@contextmanager
def register_rng_states(trace: MemoryTrace, *, cuda: bool) -> Iterator[None]:
    """Count the random generator's states that checkpointing saves for dropout: 5 KB per layer, in host memory."""
    get = torch.get_rng_state

    def counted() -> torch.Tensor:
        state = get()
        trace.register([state], ACTIVATIONS)
        return state

    with RNG_STATE.during(get if cuda else counted):
        yield
