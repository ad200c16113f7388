"""Register memory with a trace, by category, that exists before the first step or that no operation allocates."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor

from lean_finetune.config.train_schema import Train
from lean_finetune.memory.trace.fake_distributed import local
from lean_finetune.memory.trace.memory_trace import (
    ACTIVATIONS,
    ADAPTERS,
    GRADIENTS,
    OPTIMIZER,
    QUANTISATION_STATE,
    WEIGHTS,
    MemoryTrace,
)
from lean_finetune.model.quantize import quantisation_tensors
from lean_finetune.step.data_parallel import DataParallelModel
from lean_finetune.step.optimizers import device_state
from lean_finetune.step.run_optimizer import trained_parameters

FP32 = torch.float32


def register_state(
    trace: MemoryTrace,
    parallel: DataParallelModel,
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
    trained = trained_parameters(model)
    if weights_on_host:
        trace.ignore(local(tensor) for tensor in model.parameters() if isinstance(tensor, DTensor))
    trace.register([local(tensor) for tensor in (*model.parameters(), *model.buffers())], WEIGHTS)
    trace.register(quantisation_tensors(model), QUANTISATION_STATE)
    if weights_on_host:  # So are their gradients and update.
        return
    if train.method != "full":
        trace.register([local(tensor) for tensor in trained], ADAPTERS)
        if train.lora.changes_frozen_weights and not cuda:  # In host memory, which counts only on a CPU.
            start = sum(local(tensor).numel() * FP32.itemsize for tensor in trained)
            trace.register_bytes(start, ADAPTERS)
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

    torch.get_rng_state = get if cuda else counted
    try:
        yield
    finally:
        torch.get_rng_state = get
