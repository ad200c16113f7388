"""The one training step: train runs it on real tensors, estimate on fake ones."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_

from lean_finetune.model.model_spec import ModelSpec
from lean_finetune.step.activation_offload import Offload
from lean_finetune.step.batches import Batch
from lean_finetune.step.loss import summed_loss
from lean_finetune.step.loss_scaling import LossScaler
from lean_finetune.step.optimizer_in_backward import Norms, total_norm, updates_in_backward
from lean_finetune.step.process_group import Alone, Team, losses_of_all
from lean_finetune.step.run_optimizer import trained_parameters

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
    optimizer_in_backward: bool = False
    """Update each weight in backward: every step is one micro-batch, nothing is clipped and the loss is not scaled."""


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
    team: Team | None = None,
    turns: int = 0,
) -> StepResult:
    """Run one optimizer step over its micro-batches; gradients are released at the end.

    Each micro-batch's summed loss is divided by the trained tokens of the *whole* step, so any cut of the same rows
    gives the same gradients. `batches` is consumed lazily: one micro-batch is on the device at a time. With a `scaler`
    an update whose gradients overflowed is left out, and the guard is shown a norm of 0. `offload` keeps activations
    away from the device between forward and backward. Updates in backward cannot wait for the guard: it is shown the
    loss, with a norm of 0, before they begin, and the norm when they are over. In a `team` each member brings the
    micro-batches of its own `turns`; losses and norm are those of the whole step.
    """
    team = Alone(model) if team is None else team
    losses: list[torch.Tensor] = []
    norms: Norms = {}
    turn = 0
    for batch in batches:  # Not enumerated: that would hold the batch until it is asked for the next one.
        turn += 1
        compute = partial(summed_loss, batch=batch, chunk=spec.loss_chunk, offload=offload)
        with phase("forward"), model_spec.autocast(batch.input_ids_BT.device.type):
            loss = team.run(compute) / supervised_tokens
        del batch, compute
        losses.append(loss.detach())
        if spec.optimizer_in_backward:
            guard(losses, torch.zeros_like(loss))
        with phase("backward"), team.turn(last=turn == turns), _updates(optimizer, norms, spec):
            (loss if scaler is None else scaler.scaled(loss)).backward()
        del loss
    with phase("clip"):
        if spec.optimizer_in_backward:
            grad_norm = total_norm(trained_parameters(model), norms)
        else:
            grad_norm = _clip(team, spec, scaler)
        losses = losses_of_all(team, losses)
    norms.clear()
    update = scaler is None or scaler.take(grad_norm)
    guard(losses, grad_norm if update else torch.zeros_like(grad_norm))
    with phase("optimizer"):
        if update and not spec.optimizer_in_backward:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        team.finish(updated=update)
    return StepResult(loss=torch.stack(losses).sum(), grad_norm=grad_norm)


def _updates(optimizer: torch.optim.Optimizer, norms: Norms, spec: StepSpec) -> AbstractContextManager[object]:
    """The context of a backward pass."""
    return updates_in_backward(optimizer, norms) if spec.optimizer_in_backward else nullcontext()


def _clip(team: Team, spec: StepSpec, scaler: LossScaler | None) -> torch.Tensor:
    """Scale the gradients as asked; the norm they had."""
    parameters = [parameter for _, parameter in team.trained()]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if scaler is not None:
        scaler.unscale(gradients)
    grad_norm = team.norm(gradients, foreach=spec.foreach)
    if spec.max_grad_norm is not None:
        clip_grads_with_norm_(parameters, spec.max_grad_norm, grad_norm, foreach=spec.foreach)
    return grad_norm
