"""Loss scaling: fp16 gradients below 6e-8 would vanish (Micikevicius et al. 2018, arXiv 1710.03740, section 3.2)."""

from collections.abc import Callable, Sequence

import torch

from lean_finetune.core.errors import UserError

# The constants of torch.amp.GradScaler, whose rule this is; that class reads tensors where none can be traced.
FIRST_SCALE = 2.0**16
GROWTH_STEPS = 2000
"""Steps without overflow after which the scale is doubled."""
SMALLEST_SCALE = 1.0
"""Below it a gradient overflows that no scale enlarged."""


def is_finite(norm: torch.Tensor) -> bool:
    """Whether a norm is a number; waits for the device."""
    return bool(torch.isfinite(norm).item())


class LossScaler:
    """Multiplies the loss, divides the gradients, and leaves out updates whose gradients overflowed."""

    def __init__(self, finite: Callable[[torch.Tensor], bool] = is_finite):
        """Start at `FIRST_SCALE`; `finite` looks at a gradient norm."""
        self._finite = finite
        self.scale = FIRST_SCALE
        self.good_steps = 0
        """Updates made since the scale last changed."""
        self.skipped_steps = 0

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to call backward on."""
        return loss * self.scale

    def unscale(self, gradients: Sequence[torch.Tensor]) -> None:
        """Divide gradients in place; powers of two lose nothing."""
        torch._foreach_mul_(list(gradients), 1.0 / self.scale)

    def take(self, grad_norm: torch.Tensor) -> bool:
        """Whether to update with gradients of this norm; adapts the scale.

        Raises:
            UserError: gradients overflow at any scale.
        """
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
