"""The one training step: train runs it on real tensors, estimate on fake ones."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from stages.model.spec import ModelSpec
from stages.step.batches import Batch
from stages.step.loss import summed_loss
from stages.step.offload import Offload
from stages.step.optim import trained_parameters
from stages.step.scale import LossScaler

Phase = Callable[[str], AbstractContextManager[object]]
"""Opens a named part of the step: forward, backward, clip, optimizer."""

Guard = Callable[[list[torch.Tensor], torch.Tensor], None]
"""Sees the micro-batches' summed losses and the gradient norm before the update; raises to stop it."""


@dataclass(frozen=True, kw_only=True)
class StepSpec:
    """What of the step is a parameter."""

    loss_chunk: int | None
    max_grad_norm: float | None
    foreach: bool
    """Norms and clipping by the multi-tensor kernels; PyTorch's own choice on CUDA."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Scalars of one optimizer step, still on the device."""

    loss: torch.Tensor
    """Mean cross-entropy per trained token, fp32."""
    grad_norm: torch.Tensor
    """Global L2 norm of the gradients before clipping."""


def training_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Batch],
    *,
    supervised_tokens: int,
    model_spec: ModelSpec,
    spec: StepSpec,
    phase: Phase,
    guard: Guard,
    scaler: LossScaler | None = None,
    offload: Offload | None = None,
) -> StepResult:
    """Run one optimizer step over its micro-batches; gradients are released at the end.

    Each micro-batch's summed loss is divided by the trained tokens of the *whole* step, so any cut of the same rows
    gives the same gradients. `batches` is consumed lazily: one micro-batch is on the device at a time. With a `scaler`
    an update whose gradients overflowed is left out, and the guard is shown a norm of 0. `offload` keeps activations
    away from the device between forward and backward.
    """
    losses: list[torch.Tensor] = []
    for batch in batches:
        with phase("forward"), model_spec.autocast(batch.input_ids_BT.device.type):
            loss = summed_loss(model, batch, spec.loss_chunk, offload) / supervised_tokens
        del batch
        losses.append(loss.detach())
        with phase("backward"):
            (loss if scaler is None else scaler.scaled(loss)).backward()
        del loss
    gradients = [p.grad for p in trained_parameters(model) if p.grad is not None]
    with phase("clip"):
        if scaler is not None:
            scaler.unscale(gradients)
        grad_norm = get_total_norm(gradients, foreach=spec.foreach)
        if spec.max_grad_norm is not None:
            parameters = trained_parameters(model)
            clip_grads_with_norm_(parameters, spec.max_grad_norm, grad_norm, foreach=spec.foreach)
    del gradients
    update = scaler is None or scaler.take(grad_norm)
    guard(losses, grad_norm if update else torch.zeros_like(grad_norm))
    with phase("optimizer"):
        if update:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return StepResult(loss=torch.stack(losses).sum(), grad_norm=grad_norm)
