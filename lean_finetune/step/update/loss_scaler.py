"""Scale the loss, so that small fp16 gradients do not vanish, and skip updates whose gradients overflow.

The rule and constants of torch.amp.GradScaler, which cannot be traced on fake tensors because it reads values.
"""

from collections.abc import Callable, Sequence

import torch

from lean_finetune.config.schema import Train
from lean_finetune.core.errors import UserError

FIRST_SCALE = 2.0**16
GROWTH_STEPS = 2000
"""Steps without overflow until the scale doubles."""
SMALLEST_SCALE = 1.0
"""Below it gradients overflow without being scaled."""


def is_finite(norm: torch.Tensor) -> bool:
    """Whether a norm is finite; synchronises with the device."""
    return bool(torch.isfinite(norm).item())


class LossScaler:
    """Says how to scale the loss, and whether to apply an update; this base class scales nothing and applies all."""

    fields: tuple[str, ...] = ()
    """Attributes that a checkpoint keeps."""

    def __init__(self) -> None:
        self.scale = 1.0
        """What to multiply the loss by before backward."""
        self.skipped_steps: int | None = None
        """Updates that were skipped; None for a run that skips none."""

    def unscale(self, gradients: Sequence[torch.Tensor]) -> None:
        """Divide gradients by the scale, in place."""

    def take(self, grad_norm: torch.Tensor) -> bool:
        """Whether to apply the update, by the norm of the gradients; adapts the scale."""
        return True


class Fp16LossScaler(LossScaler):
    """Scales the loss, unscales the gradients, and skips updates whose gradients overflowed."""

    fields = ("scale", "good_steps", "skipped_steps")

    def __init__(self, finite: Callable[[torch.Tensor], bool] = is_finite) -> None:
        """`finite` tests a gradient norm; estimate replaces it, since fake tensors have no values."""
        super().__init__()
        self._finite = finite
        self.scale = FIRST_SCALE
        self.good_steps = 0
        """Updates since the scale last changed."""
        self.skipped_steps: int = 0

    def unscale(self, gradients: Sequence[torch.Tensor]) -> None:
        """See the base class; the scale is a power of two, so this is exact."""
        torch._foreach_mul_(list(gradients), 1.0 / self.scale)

    def take(self, grad_norm: torch.Tensor) -> bool:
        """See the base class. Raises UserError if gradients overflow at any scale."""
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


def loss_scaler(train: Train, finite: Callable[[torch.Tensor], bool] = is_finite) -> LossScaler:
    """The scaler for the precision of a run; `finite` as of `Fp16LossScaler`."""
    return Fp16LossScaler(finite) if train.scales_loss else LossScaler()
