"""The training step, from top to bottom: train runs it on real tensors, and estimate on fake ones."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_

from lean_finetune.config.schema import Train
from lean_finetune.model.experts.experts_forward import counting_rows, expert_load, forget_rows
from lean_finetune.model.precision import autocast
from lean_finetune.step.batches import Batch
from lean_finetune.step.loss import summed_loss
from lean_finetune.step.offload.activation_offload import KeptActivations
from lean_finetune.step.parallel_model import ParallelModel
from lean_finetune.step.step_loss import StepGoal
from lean_finetune.step.update.in_backward import Norms, total_norm, updates_in_backward
from lean_finetune.step.update.loss_scaler import LossScaler

Phase = Callable[[str], AbstractContextManager[object]]
"""Opens a named phase of the step: forward, backward, clip or optimizer."""

Guard = Callable[[list[torch.Tensor], torch.Tensor], None]
"""Called with the micro-batches' summed losses and the gradient norm before the update (with updates in backward:
before and after them); raises to stop the run."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Scalars of one optimizer step, still on the device."""

    loss: torch.Tensor
    """Mean cross-entropy per trained token, or the mean loss of the objective, fp32."""
    grad_norm: torch.Tensor
    """Global L2 norm of the gradients before clipping."""
    expert_load: torch.Tensor | None
    """How evenly tokens are spread over experts, two values (see `expert_load`); None without experts."""
    figures: tuple[torch.Tensor, ...]
    """`TokenLoss.figures` of the step, which `known_figures` reads."""


def training_step(
    parallel: ParallelModel,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Batch],
    *,
    before: Iterable[Batch],
    micro_batches: int,
    goal: StepGoal,
    train: Train,
    foreach: bool,
    phase: Phase,
    guard: Guard,
    scaler: LossScaler,
    offload: KeptActivations,
) -> StepResult:
    """Run one optimizer step over its micro-batches and free the gradients.

    Args (those that their types do not explain):
        batches: this process's micro-batches, read lazily: one is on the device at a time.
        before: those of rows that are not trained, for `TokenLoss.before`; read before `batches`.
        micro_batches: the length of `batches`.
        foreach: compute norms and clip with the multi-tensor kernels, as PyTorch does on CUDA.
        guard: gets a norm of 0 if `scaler` skips the update. With updates in backward it is called twice:
            before backward with a norm of 0, and after it.

    With updates in backward, the weights change in phase backward, and phases clip and optimizer update nothing.
    """
    objective = goal.begin(train.loss_chunk, scaler.scale)
    loss_of = partial(summed_loss, objective=objective, offload=offload, exchange=parallel.exchange)
    loss_of = partial(loss_of, router_aux_loss=train.router_aux_loss)
    losses: list[torch.Tensor] = []
    norms: Norms = {}
    forget_rows(parallel.modules)

    def evaluate(batch: Batch, compute: Callable[[nn.Module, Batch], None]) -> None:
        with phase("forward"), autocast(train, batch.device_type), torch.no_grad():
            parallel.run(lambda model: compute(model, batch))

    def forward(batch: Batch) -> torch.Tensor:
        with phase("forward"), autocast(train, batch.device_type), counting_rows(idle=batch.idle):
            return parallel.run(partial(loss_of, batch=batch))

    def backward(loss: torch.Tensor) -> None:
        losses.append(loss.detach() / scaler.scale)
        updates: AbstractContextManager[object] = nullcontext()
        if train.optimizer_in_backward:
            guard(losses, torch.zeros_like(loss))  # Backward updates weights: a broken loss must not reach it.
            updates = updates_in_backward(optimizer, norms, parallel.after_gradient)
        with phase("backward"), parallel.gradient_sync(last=len(losses) == micro_batches), updates:
            loss.backward()

    objective.before(before, evaluate, parallel)
    parallel.forward_backward(batches, forward, backward)
    with phase("clip"):
        # Only after the last backward: of a sharded model this moves gradients to the local shards.
        trained = [parameter for _, parameter in parallel.trained_parameters()]
        if train.optimizer_in_backward:
            # With train.offload=parameters, the gradients and their norms are in host memory.
            grad_norm = total_norm(trained, norms).to(losses[0].device)
        else:
            gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
            scaler.unscale(gradients)
            grad_norm = parallel.gradient_norm(gradients, foreach=foreach)
            if train.max_grad_norm is not None:
                clip_grads_with_norm_(trained, train.max_grad_norm, grad_norm, foreach=foreach)
            del gradients
        losses[:] = parallel.losses_of_all_ranks(losses)  # All processes stop together if one loss is not finite.
        load = expert_load(parallel.modules, parallel.sum_over_ranks)
        figures = objective.figures(parallel)
    del trained
    norms.clear()
    update = scaler.take(grad_norm)
    guard(losses, grad_norm if update else torch.zeros_like(grad_norm))
    with phase("optimizer"):
        if update and not train.optimizer_in_backward:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        parallel.end_step(updated=update)
    return StepResult(loss=torch.stack(losses).sum(), grad_norm=grad_norm, expert_load=load, figures=figures)
