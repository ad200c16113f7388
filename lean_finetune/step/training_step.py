"""The training step: train runs it on real tensors, and estimate on fake ones."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_

from lean_finetune.config.train_schema import Train
from lean_finetune.model.experts.experts_forward import counting_rows, expert_load, forget_rows
from lean_finetune.model.precision import autocast
from lean_finetune.step.activation_offload import ActivationOffload
from lean_finetune.step.batches import Batch
from lean_finetune.step.data_parallel import DataParallelModel
from lean_finetune.step.loss import summed_loss
from lean_finetune.step.loss_scaling import LossScaler
from lean_finetune.step.optimizer_in_backward import Norms, total_norm, updates_in_backward

Phase = Callable[[str], AbstractContextManager[object]]
"""Opens a named phase of the step: forward, backward, clip or optimizer."""

Guard = Callable[[list[torch.Tensor], torch.Tensor], None]
"""Called with the micro-batches' summed losses and the gradient norm before the update; raises to prevent it."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Scalars of one optimizer step, still on the device."""

    loss: torch.Tensor
    """Mean cross-entropy per trained token, fp32."""
    grad_norm: torch.Tensor
    """Global L2 norm of the gradients before clipping."""
    expert_load: torch.Tensor | None
    """How evenly tokens are spread over experts, two values (see `expert_load`); None without experts."""


def training_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Batch],
    *,
    supervised_tokens: int,
    train: Train,
    foreach: bool,
    phase: Phase,
    guard: Guard,
    scaler: LossScaler | None = None,
    offload: ActivationOffload | None = None,
    parallel: DataParallelModel | None = None,
    micro_batches: int = 0,
) -> StepResult:
    """Run one optimizer step over its micro-batches and free the gradients.

    Each micro-batch's summed loss is divided by the trained tokens of the *whole* step, so every division of the same
    rows into micro-batches gives the same gradients.

    Args (those that their types do not explain):
        batches: this process's micro-batches, read lazily: one is on the device at a time.
        supervised_tokens: trained tokens of the step, over all processes.
        foreach: compute norms and clip with the multi-tensor kernels, as PyTorch does on CUDA.
        guard: gets a norm of 0 if `scaler` skips the update, and before updates in backward, after which it runs again.
        micro_batches: how many `batches` has, needed with `parallel` alone.
    """
    parallel = DataParallelModel(model) if parallel is None else parallel
    losses: list[torch.Tensor] = []  # One for each backward.
    norms: Norms = {}
    loss_scale = 1.0 if scaler is None else scaler.scale
    divisor = supervised_tokens / loss_scale
    forward = partial(_forward, parallel, train, phase, chunk=train.loss_chunk, offload=offload, divisor=divisor)

    def backward(loss: torch.Tensor) -> None:
        losses.append(loss.detach() / loss_scale)
        if train.optimizer_in_backward:
            guard(losses, torch.zeros_like(loss))
        sync = parallel.gradient_sync(last=len(losses) == micro_batches)
        updates = updates_in_backward(optimizer, norms, parallel) if train.optimizer_in_backward else nullcontext()
        with phase("backward"), sync, updates:
            loss.backward()

    forget_rows(parallel.model)
    parallel.run_micro_batches(batches, forward, backward)
    with phase("clip"):
        if train.optimizer_in_backward:
            grad_norm = total_norm(_trained(parallel), norms).to(losses[0].device)
        else:
            grad_norm = _clip(parallel, train.max_grad_norm, scaler, foreach=foreach)
        losses = parallel.losses_of_all_ranks(losses)
        load = expert_load(parallel.model, parallel.sum_over_ranks)
    norms.clear()
    update = scaler is None or scaler.take(grad_norm)
    guard(losses, grad_norm if update else torch.zeros_like(grad_norm))
    with phase("optimizer"):
        if update and not train.optimizer_in_backward:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        parallel.end_step(updated=update)
    return StepResult(loss=torch.stack(losses).sum(), grad_norm=grad_norm, expert_load=load)


def _forward(parallel: DataParallelModel, train: Train, phase: Phase, batch: Batch, **options: Any) -> torch.Tensor:
    """Forward pass of one micro-batch, to its summed loss; `options` go to `summed_loss`."""
    router_aux_loss, exchange = train.router_aux_loss, parallel.exchange
    compute = partial(summed_loss, batch=batch, router_aux_loss=router_aux_loss, exchange=exchange, **options)
    counting = counting_rows(idle=batch.idle)
    with phase("forward"), autocast(train, batch.input_ids_BT.device.type), counting:
        return parallel.run(compute)


def _trained(parallel: DataParallelModel) -> list[nn.Parameter]:
    """This process's share of the trained parameters."""
    return [parameter for _, parameter in parallel.trained_parameters()]


def _clip(
    parallel: DataParallelModel, max_grad_norm: float | None, scaler: LossScaler | None, *, foreach: bool
) -> torch.Tensor:
    """Unscale and clip the gradients; their norm before clipping."""
    parameters = _trained(parallel)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if scaler is not None:
        scaler.unscale(gradients)
    grad_norm = parallel.gradient_norm(gradients, foreach=foreach)
    if max_grad_norm is not None:
        clip_grads_with_norm_(parameters, max_grad_norm, grad_norm, foreach=foreach)
    return grad_norm
