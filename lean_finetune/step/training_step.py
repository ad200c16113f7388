"""The training step: train runs it on real tensors, and estimate on fake ones.

`training_step` reads from top to bottom; what it calls below it: scaling the loss (fp16), updates in backward, and the
checks that stop a run which cannot learn.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_

from cuda_memory.units import counted
from lean_finetune.config.schema import Train
from lean_finetune.core.errors import UserError
from lean_finetune.model.experts.experts_forward import counting_rows, expert_load, forget_rows
from lean_finetune.model.images.image_config import part_of_images
from lean_finetune.model.precision import autocast
from lean_finetune.plan.batch_plan import MicroBatch
from lean_finetune.step.batches import Batch
from lean_finetune.step.loss import summed_loss, token_losses
from lean_finetune.step.offload.activation_offload import ActivationOffload
from lean_finetune.step.parallel_model import ParallelModel
from lean_finetune.step.preference_loss import PreferenceLoss, StepPreferences

Phase = Callable[[str], AbstractContextManager[object]]
"""Opens a named phase of the step: forward, backward, clip or optimizer."""

Guard = Callable[[list[torch.Tensor], torch.Tensor], None]
"""Called with the micro-batches' summed losses and the gradient norm before the update (with updates in backward:
before and after them); raises to stop the run."""

Norms = dict[torch.Tensor, torch.Tensor]
"""The gradient norm of each parameter, with updates in backward."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Scalars of one optimizer step, still on the device."""

    loss: torch.Tensor
    """Mean cross-entropy per trained token, fp32."""
    grad_norm: torch.Tensor
    """Global L2 norm of the gradients before clipping."""
    expert_load: torch.Tensor | None
    """How evenly tokens are spread over experts, two values (see `expert_load`); None without experts."""
    rewards: torch.Tensor | None
    """`preference_loss.FIGURES` of the step, fp32 (5,); None for supervised fine-tuning."""


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
    scaler: "LossScaler | None" = None,
    offload: ActivationOffload | None = None,
    parallel: ParallelModel | None = None,
    micro_batches: int = 0,
    preferences: StepPreferences | None = None,
    mismatched: Iterable[Batch] = (),
) -> StepResult:
    """Run one optimizer step over its micro-batches and free the gradients.

    Args (those that their types do not explain):
        batches: this process's micro-batches, read lazily: one is on the device at a time.
        supervised_tokens: tokens of the step that are predicted and trained, over all processes.
        foreach: compute norms and clip with the multi-tensor kernels, as PyTorch does on CUDA.
        guard: gets a norm of 0 if `scaler` skips the update. With updates in backward it is called twice:
            before backward with a norm of 0, and after it.
        micro_batches: the length of `batches`; only needed if `parallel` is given.
        preferences: the objective of preferences, and the step's figures for it.
        mismatched: micro-batches of mismatched answers, if the objective needs them; they need no activations.

    With updates in backward, the weights change in phase backward, and phases clip and optimizer update nothing.
    """
    parallel = ParallelModel(model) if parallel is None else parallel
    pending: deque[torch.Tensor] = deque()  # Losses between forward and backward; of a pipeline, several.
    losses: list[torch.Tensor] = []
    norms: Norms = {}
    loss_scale = 1.0 if scaler is None else scaler.scale
    # The tokens of the *whole* step: any division of its rows into micro-batches then gives the same gradients.
    divisor = supervised_tokens / loss_scale
    preference_loss = None if preferences is None else PreferenceLoss(step=preferences, loss_scale=loss_scale)
    loss_of = partial(summed_loss, chunk=train.loss_chunk, offload=offload, divisor=divisor, exchange=parallel.exchange)
    loss_of = partial(loss_of, preference_loss=preference_loss, router_aux_loss=train.router_aux_loss)
    forget_rows(parallel.modules)
    if preference_loss is not None and preference_loss.step.has_mismatches:
        _estimate_divergence(preference_loss, mismatched, train, phase, parallel)
    for batch in parallel.schedule(batches):
        if batch is not None:
            device_type = batch.input_ids_BT.device.type
            with phase("forward"), autocast(train, device_type), counting_rows(idle=batch.idle):
                pending.append(parallel.run(partial(loss_of, batch=batch)))
            del batch  # Its memory is free in backward, and while the next one is made.
            continue
        loss = pending.popleft()  # None: the oldest loss runs backward.
        losses.append(loss.detach() / loss_scale)
        updates: AbstractContextManager[object] = nullcontext()
        if train.optimizer_in_backward:
            guard(losses, torch.zeros_like(loss))  # Backward updates weights: a broken loss must not reach it.
            updates = updates_in_backward(optimizer, norms, parallel)
        with phase("backward"), parallel.gradient_sync(last=len(losses) == micro_batches), updates:
            loss.backward()
        del loss, updates  # A loss keeps its graph alive.
    with phase("clip"):
        # Only after the last backward: of a sharded model this moves gradients to the local shards.
        trained = [parameter for _, parameter in parallel.trained_parameters()]
        if train.optimizer_in_backward:
            # With train.offload=parameters, the gradients and their norms are in host memory.
            grad_norm = total_norm(trained, norms).to(losses[0].device)
        else:
            gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
            if scaler is not None:
                scaler.unscale(gradients)
            grad_norm = parallel.gradient_norm(gradients, foreach=foreach)
            if train.max_grad_norm is not None:
                clip_grads_with_norm_(trained, train.max_grad_norm, grad_norm, foreach=foreach)
            del gradients
        losses = parallel.losses_of_all_ranks(losses)  # All processes stop together if one loss is not finite.
        load = expert_load(parallel.modules, parallel.sum_over_ranks)
        rewards = None if preference_loss is None else preference_loss.means(parallel.sum_over_ranks)
    del trained
    norms.clear()
    update = scaler is None or scaler.take(grad_norm)
    guard(losses, grad_norm if update else torch.zeros_like(grad_norm))
    with phase("optimizer"):
        if update and not train.optimizer_in_backward:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        parallel.end_step(updated=update)
    return StepResult(loss=torch.stack(losses).sum(), grad_norm=grad_norm, expert_load=load, rewards=rewards)


def _estimate_divergence(
    loss: PreferenceLoss, batches: Iterable[Batch], train: Train, phase: Phase, parallel: ParallelModel
) -> None:
    """Estimate the divergence from the reference by the step's mismatched answers, without gradients.

    In evaluation mode: nothing is recomputed, so layers need no checkpoints.
    """
    parallel.model.eval()
    for batch in batches:
        device_type, tokens = batch.input_ids_BT.device.type, batch.input_ids_BT.numel()
        with phase("forward"), autocast(train, device_type), torch.no_grad():
            losses_N = parallel.run(partial(token_losses, batch=batch, chunk=train.loss_chunk or tokens))
            loss.add_mismatches(losses_N, batch)
        del batch, losses_N
    parallel.model.train()
    loss.estimate(parallel.sum_over_ranks)


# Scale the loss, so that small fp16 gradients do not vanish, and skip updates whose gradients overflow.
#
# The rule and constants of torch.amp.GradScaler, which cannot be traced on fake tensors because it reads values.
FIRST_SCALE = 2.0**16
GROWTH_STEPS = 2000
"""Steps without overflow until the scale doubles."""
SMALLEST_SCALE = 1.0
"""Below it gradients overflow without being scaled."""


def is_finite(norm: torch.Tensor) -> bool:
    """Whether a norm is finite; synchronises with the device."""
    return bool(torch.isfinite(norm).item())


class LossScaler:
    """Says how to scale the loss, unscales the gradients, and skips updates whose gradients overflowed."""

    def __init__(self, finite: Callable[[torch.Tensor], bool] = is_finite):
        """`finite` tests a gradient norm; estimate replaces it, since fake tensors have no values."""
        self._finite = finite
        self.scale = FIRST_SCALE
        """What to multiply the loss by before backward."""
        self.good_steps = 0
        """Updates since the scale last changed."""
        self.skipped_steps = 0

    def unscale(self, gradients: Sequence[torch.Tensor]) -> None:
        """Divide gradients in place; the scale is a power of two, so this is exact."""
        torch._foreach_mul_(list(gradients), 1.0 / self.scale)

    def take(self, grad_norm: torch.Tensor) -> bool:
        """Whether to apply the update; adapts the scale. Raises UserError if gradients overflow at any scale."""
        if self._finite(grad_norm):
            self.good_steps += 1
            if self.good_steps == GROWTH_STEPS:
                self.scale, self.good_steps = self.scale * 2.0, 0
            return True
        self.scale, self.good_steps = self.scale / 2.0, 0
        self.skipped_steps += 1
        if self.scale < SMALLEST_SCALE:
            raise UserError(
                f"train.precision: fp16 gradients overflow even unscaled; got fp16, {self.skipped_steps} updates "
                "skipped; lower train.lr, or use bf16 or fp32"
            )
        return False


# Update each weight in backward, as soon as its gradient is complete (train.optimizer_in_backward).
#
# The gradient is freed at once, so all of them never exist together (Lv et al. 2023, arXiv 2306.09782). No weight that
# backward still needs is updated: autograd would raise.


@contextmanager
def updates_in_backward(optimizer: torch.optim.Optimizer, norms: Norms, parallel: ParallelModel) -> Iterator[None]:
    """A context in which backward updates each parameter, frees its gradient and stores the norm in `norms`."""
    groups = optimizer.param_groups

    def updater(group: dict[str, Any], parameter: nn.Parameter) -> Callable[[], None]:
        def update() -> None:
            assert parameter.grad is not None and parameter not in norms, "one gradient per step"
            norms[parameter] = torch.linalg.vector_norm(parameter.grad)
            # The step then updates this parameter alone; state is stored by parameter, so none is lost.
            optimizer.param_groups = [{**group, "params": [parameter]}]
            optimizer.step()
            parameter.grad = None

        return update

    hooks = [parallel.after_gradient(p, updater(group, p)) for group in groups for p in group["params"]]
    try:
        yield
    finally:
        optimizer.param_groups = groups
        for hook in hooks:
            hook.remove()


def total_norm(parameters: list[nn.Parameter], norms: Norms) -> torch.Tensor:
    """The total norm of all gradients, as torch.nn.utils.get_total_norm computes it."""
    return torch.linalg.vector_norm(torch.stack([norms[parameter] for parameter in parameters if parameter in norms]))


def refuse_in_backward(train: Train, micro_batches: Sequence[int] | np.ndarray) -> None:
    """Raise UserError for updates in backward if a step has several micro-batches, or gradients are scaled.

    `micro_batches` is their number in each optimizer step; the precision of `train` is resolved for the device.
    """
    if train.scales_loss:
        raise UserError(
            f"train.optimizer_in_backward: updates before fp16's overflow is known; got true where train.precision is "
            f"{train.precision} on this device; use bf16 or fp32, or set it to false"
        )
    step = int(np.argmax(micro_batches))
    if micro_batches[step] > 1:
        raise UserError(
            f"train.optimizer_in_backward: every optimizer step must be one micro-batch; step {step} has "
            f"{micro_batches[step]}; lower train.tokens_per_step or raise bucket.max_tokens (in mode fixed "
            "bucket.fixed_rows), or set it to false"
        )


# Stop a run that cannot learn: losses, gradients or weights that are not finite, adapters without gradients.


class Diverged(UserError):
    """A loss, gradient or weight is not finite."""


def refuse_non_finite(
    losses: list[torch.Tensor], grad_norm: torch.Tensor, step: int, micro_batches: list[MicroBatch]
) -> None:
    """Stop before the update if a loss or the gradient norm is not finite.

    Raises:
        Diverged: naming the step, the micro-batch and its rows.
    """
    # One read for all of them: each read waits for the device.
    finite = torch.isfinite(torch.stack([*losses, grad_norm.to(losses[0].dtype)])).tolist()
    if all(finite):
        return
    index = finite.index(False)
    if index == len(losses):
        raise Diverged(
            f"train.lr: gradient must be finite; its norm is {grad_norm.item()} at optimizer step {step} "
            f"(losses of its micro-batches are finite); lower train.lr or set train.max_grad_norm"
        )
    rows = micro_batches[index].rows.tolist()
    shown = ", ".join(map(str, rows[:8])) + (", …" if len(rows) > 8 else "")
    raise Diverged(
        f"train.lr: loss must be finite; it is {losses[index].item()} at optimizer step {step}, micro-batch {index} "
        f"(training rows {shown}); lower train.lr, or check these rows"
    )


def refuse_dead_adapters(parallel: ParallelModel, *, images: bool) -> None:
    """Refuse adapters without a gradient in the first step: they would learn nothing while the loss looks normal.

    `images`: whether the step has any; without, those of the parts for images have none.

    Raises:
        UserError: naming the first such layer.
    """
    # B alone: the gradient of A is zero as long as B is, as at the start of a run.
    adapters = {
        name: parameter
        for name, parameter in parallel.trained_parameters()
        if "lora_B." in name and (images or not part_of_images(name))
    }
    alive = [parameter.grad is not None and bool(parameter.grad.any()) for parameter in adapters.values()]
    for name, is_alive in zip(adapters, _in_any(parallel, alive), strict=True):
        if not is_alive:
            raise UserError(
                f"train.lora.targets: every adapter must receive a gradient; that of {name} is zero in the first step; "
                "exclude its layer, or set train.grad_ckpt=false"
            )


def refuse_broken_weights(parallel: ParallelModel, steps: int) -> None:
    """Refuse to save weights that are not finite: an update can break them after its loss was checked.

    Raises:
        Diverged: naming the first such parameter.
    """
    trained = {name: p.detach() for name, p in parallel.trained_parameters()}
    filled = {name: weight for name, weight in trained.items() if weight.numel()}  # A shard may be empty.
    # aminmax returns NaN if any value is. Unlike isfinite it needs no memory of a weight's size.
    extremes = torch.stack([value.float() for weight in filled.values() for value in weight.aminmax()])
    finite = dict(zip(filled, torch.isfinite(extremes).view(-1, 2).all(1).tolist(), strict=True))
    broken = _in_any(parallel, [not finite.get(name, True) for name in trained])
    if any(broken):
        name = list(trained)[broken.index(True)]
        raise Diverged(
            f"train.lr: weights must be finite; {name} is not, after {counted(steps, 'step')}; lower train.lr"
        )


def _in_any(parallel: ParallelModel, flags: list[bool]) -> list[bool]:
    """Return for each flag whether it is set in any process, so that all processes stop together."""
    if parallel.size == 1 or not flags or not parallel.same_parameters:  # A stage that stops ends the others too.
        return flags
    device = next(parallel.model.parameters()).device
    return (parallel.sum_over_ranks(torch.tensor(flags, dtype=torch.float32, device=device)) > 0).tolist()
