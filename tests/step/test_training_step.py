"""The training step learns the same for any division into micro-batches and any memory switch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import get_linear_schedule_with_warmup

from lean_finetune.core.errors import UserError
from lean_finetune.step.loss import check_head, summed_loss
from lean_finetune.step.run_optimizer import learning_rate
from lean_finetune.step.step_loss import TokenLoss
from tests.kit.loaded import load_model
from tests.small_model import CPU, spec_of
from tests.step.common import rows, split


def test_loss_is_that_of_the_model_on_unpadded_rows(small_llama: Path):
    """An independent computation: transformers' own forward on each row alone, labels on the trained tokens."""
    model = load_model(small_llama, spec_of(method="full"), CPU)
    total = 0.0
    for ids, spans in rows():
        input_ids = torch.tensor(ids.astype(np.int64))[None]
        logits = model(input_ids=input_ids, use_cache=False).logits[0]
        start, end = spans[0].tolist()
        total += F.cross_entropy(logits[start - 1 : end - 1], input_ids[0, start:end], reduction="sum").item()
    for chunk in (None, 16):
        ours = sum(summed_loss(model, batch, TokenLoss(chunk)).item() for batch in split([8]))
        assert ours == pytest.approx(total, rel=1e-5)


def test_learning_rate_warms_up_and_falls(small_llama: Path):
    spec = spec_of(optimizer="adamw", lr=1.0, weight_decay=0.0, schedule="cosine", warmup_fraction=0.2)
    rates = [learning_rate(step, 10, spec) for step in range(10)]
    assert rates[:3] == [0.5, 1.0, 1.0] and rates == sorted(rates[:2]) + sorted(rates[2:], reverse=True)
    assert 0 < rates[-1] < 0.1
    constant = spec_of(optimizer="adamw", lr=1.0, weight_decay=0.0, schedule="constant", warmup_fraction=0.0)
    assert {learning_rate(step, 5, constant) for step in range(5)} == {1.0}


def test_a_linear_schedule_is_that_of_transformers():
    """Another decay than Hugging Face's. Its warm-up begins at 0 and wastes a step; ours is one step ahead of it."""
    steps, warmup = 20, 4
    spec = spec_of(optimizer="adamw", lr=0.3, weight_decay=0.0, schedule="linear", warmup_fraction=warmup / steps)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    scheduler = get_linear_schedule_with_warmup(optimizer, warmup, steps)
    theirs = []
    for _ in range(steps):
        theirs += scheduler.get_last_lr()
        optimizer.step()
        scheduler.step()
    ours = [learning_rate(step, steps, spec) for step in range(steps)]
    assert ours[warmup:] == pytest.approx(theirs[warmup:]) and ours[: warmup - 1] == pytest.approx(theirs[1:warmup])
    assert ours[-1] > 0.0


def test_a_model_that_changes_its_logits_after_the_head_is_refused(small_llama: Path):
    """Decoder plus head would train another loss than the model's own."""
    model = load_model(small_llama, spec_of(method="full"), CPU)
    check_head(model, CPU)
    forward = model.forward

    def changed(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.logits = output.logits * 0.5 + 1.0
        return output

    model.forward = changed
    with pytest.raises(UserError, match="changes its logits"):
        check_head(model, CPU)


def test_a_model_that_looks_ahead_is_refused(small_llama: Path):
    """Without a mask, a model that sees later tokens would see the padding."""
    model = load_model(small_llama, spec_of(method="full"), CPU)
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.self_attn.is_causal = False
    with pytest.raises(UserError, match="must be causal"):
        check_head(model, CPU)
