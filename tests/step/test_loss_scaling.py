"""Loss scaling: the rule of torch's GradScaler, no update from what overflowed, and an end where nothing helps."""

import pytest
import torch

from lean_finetune.core.errors import UserError
from lean_finetune.step.update import loss_scaler
from lean_finetune.step.update.loss_scaler import Fp16LossScaler


def test_the_scale_moves_as_that_of_torch(monkeypatch: pytest.MonkeyPatch):
    """Another rule than the known one would have to be proven anew."""
    monkeypatch.setattr(loss_scaler, "GROWTH_STEPS", 3)
    ours, theirs = Fp16LossScaler(), torch.amp.GradScaler("cpu", init_scale=loss_scaler.FIRST_SCALE, growth_interval=3)
    a, b = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizers = [torch.optim.SGD([p], lr=0.1) for p in (a, b)]
    for overflow in [True, False, False, False, False, True, False, False, False, False]:
        factor = float("inf") if overflow else 0.5
        ((a * factor).sum() * ours.scale).backward()
        assert a.grad is not None
        ours.unscale([a.grad])
        if ours.take(a.grad.norm()):
            optimizers[0].step()
        theirs.scale((b * factor).sum()).backward()
        theirs.step(optimizers[1])
        theirs.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
        assert ours.scale == theirs.get_scale() and torch.equal(a, b)
    assert ours.skipped_steps == 2


def test_overflow_at_any_scale_ends_the_run_in_one_line():
    """A scale halved forever would train nothing, silently."""
    scaler = Fp16LossScaler()
    with pytest.raises(UserError, match=r"train\.precision: fp16 gradients overflow even unscaled") as caught:
        for _ in range(100):
            scaler.take(torch.tensor(float("nan")))
    assert "\n" not in str(caught.value) and scaler.skipped_steps == 17
