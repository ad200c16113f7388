"""Loss scaling: fp16 gradients below 6e-8 would vanish (Micikevicius et al. 2018, arXiv 1710.03740, section 3.2)."""

from collections.abc import Callable, Sequence

import torch

from lean_finetune.core.errors import UserError

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
