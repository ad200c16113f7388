"""What is held before the first step, told to a trace by what it is for."""

import torch
from torch.distributed.tensor import DTensor

from stages.estimate.fake_team import local
from stages.estimate.trace import (
    ADAPTERS,
    GRADIENTS,
    OPTIMIZER,
    QUANTISATION_STATE,
    SHARDING,
    WEIGHTS,
    MemoryTrace,
)
from stages.model.quantize import quantisation_tensors
from stages.model.spec import ModelSpec
from stages.param_types import OptimizerName
from stages.step.optim import trained_parameters
from stages.step.optimizers import device_state
from stages.step.team import Team

FP32 = torch.float32


def hold_state(
    trace: MemoryTrace,
    team: Team,
    optimizer: torch.optim.Optimizer,
    spec: ModelSpec,
    name: OptimizerName,
    *,
    cuda: bool,
) -> None:
    """Count what exists before the first step, and have gradients counted as such when they are made."""
    model = team.model
    trained = trained_parameters(model)
    trace.hold([local(tensor) for tensor in (*model.parameters(), *model.buffers())], WEIGHTS)
    trace.hold(quantisation_tensors(model), QUANTISATION_STATE)
    if spec.method != "full":
        trace.hold([local(tensor) for tensor in trained], ADAPTERS)
        if spec.keeps_start and not cuda:  # In host memory, which is the device's own on a CPU.
            start = sum(local(tensor).numel() * FP32.itemsize for tensor in trained)
            trace.hold_bytes(start, ADAPTERS)
    trace.hold(device_state(optimizer, name, cuda=cuda), OPTIMIZER)

    def hold_gradient(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        trace.hold([local(parameter.grad)], GRADIENTS, but=SHARDING)  # DDP's buckets stay buckets.

    for parameter in trained:
        if not isinstance(parameter, DTensor):  # Those that are cut are told apart where they are summed.
            parameter.register_post_accumulate_grad_hook(hold_gradient)
