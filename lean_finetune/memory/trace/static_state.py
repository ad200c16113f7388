"""What is held before the first step, or by what no operation makes, told to a trace by what it is for."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor

from lean_finetune.config.field_types import OptimizerName
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
from lean_finetune.model.model_spec import ModelSpec
from lean_finetune.model.quantize import quantisation_tensors
from lean_finetune.step.optimizers import device_state
from lean_finetune.step.parallel_model import ParallelModel
from lean_finetune.step.run_optimizer import trained_parameters

FP32 = torch.float32


def hold_state(
    trace: MemoryTrace,
    parallel: ParallelModel,
    optimizer: torch.optim.Optimizer,
    spec: ModelSpec,
    name: OptimizerName,
    *,
    cuda: bool,
    parts_away: bool = False,
) -> None:
    """Count what exists before the first step, and have gradients counted as such when they are made.

    `parts_away` says that what is cut, and its update, is in the host's memory.
    """
    model = parallel.model
    trained = trained_parameters(model)
    if parts_away:
        trace.leave_out(local(tensor) for tensor in model.parameters() if isinstance(tensor, DTensor))
    trace.hold([local(tensor) for tensor in (*model.parameters(), *model.buffers())], WEIGHTS)
    trace.hold(quantisation_tensors(model), QUANTISATION_STATE)
    if parts_away:  # Gradients and the update follow their weights.
        return
    if spec.method != "full":
        trace.hold([local(tensor) for tensor in trained], ADAPTERS)
        if spec.keeps_first_adapters and not cuda:  # In host memory, which is the device's own on a CPU.
            start = sum(local(tensor).numel() * FP32.itemsize for tensor in trained)
            trace.hold_bytes(start, ADAPTERS)
    trace.hold(device_state(optimizer, name, cuda=cuda), OPTIMIZER)

    def hold_gradient(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        trace.hold([local(parameter.grad)], GRADIENTS)

    for parameter in trained:
        if not isinstance(parameter, DTensor):  # Those that are cut are told apart where they are summed.
            parameter.register_post_accumulate_grad_hook(hold_gradient)


@contextmanager
def random_states_held(trace: MemoryTrace, *, cuda: bool) -> Iterator[None]:
    """Count the states of the random generator that checkpointing keeps for dropout, 5 KB a layer, in host memory."""
    get = torch.get_rng_state

    def counted() -> torch.Tensor:
        state = get()
        trace.hold([state], ACTIVATIONS)
        return state

    torch.get_rng_state = get if cuda else counted
    try:
        yield
    finally:
        torch.get_rng_state = get
