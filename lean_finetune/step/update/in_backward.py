"""Update each weight in backward, as soon as its gradient is complete (train.optimizer_in_backward).

The gradient is freed at once, so all of them never exist together (Lv et al. 2023, arXiv 2306.09782). No weight that
backward still needs is updated: autograd would raise.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lean_finetune.config.schema import Train
from lean_finetune.core.errors import UserError

Norms = dict[torch.Tensor, torch.Tensor]
"""The gradient norm of each parameter."""
AfterGradient = Callable[[nn.Parameter, Callable[[], None]], RemovableHandle]
"""`ParallelModel.after_gradient`."""


@contextmanager
def updates_in_backward(
    optimizer: torch.optim.Optimizer, norms: Norms, after_gradient: AfterGradient
) -> Iterator[None]:
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

    hooks = [after_gradient(p, updater(group, p)) for group in groups for p in group["params"]]
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
