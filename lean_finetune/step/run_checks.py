"""Stop a run that cannot learn: losses, gradients or weights that are not finite, adapters without gradients."""

import torch

from cuda_memory.units import counted
from lean_finetune.core.errors import UserError
from lean_finetune.islands.tower import TOWER
from lean_finetune.plan.batch_plan import MicroBatch
from lean_finetune.step.parallel_model import ParallelModel


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


def refuse_dead_adapters(parallel: ParallelModel, *, whole: bool) -> None:
    """Refuse adapters without a gradient in the first step: they would learn nothing while the loss looks normal.

    `whole`: whether the step reaches the parts beside decoder and head; those have none otherwise.

    Raises:
        UserError: naming the first such layer.
    """
    # B alone: the gradient of A is zero as long as B is, as at the start of a run.
    adapters = {
        name: parameter
        for name, parameter in parallel.trained_parameters()
        if "lora_B." in name and (whole or not TOWER.is_beside(name))
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
