"""The head's loss with gradients from the same pass: every kind of head, its accuracy, and what it allocates."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lean_finetune.step import head_loss
from lean_finetune.step.head_loss import Head, summed_head_loss
from lean_finetune.train.monitor.measured_peak import make_meter
from tests.kit.estimate_cpu import without_onednn
from tests.small_model import CPU

Draw = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Hidden states, trained positions, and the tokens trained there."""


def head_of(layer: nn.Module, **changes: Any) -> Head:
    return Head(layer=layer, **{"vocabulary": None, "factor": 1.0, "cap": None, "shard": None, **changes})


def draws(count: int, *, positions: int, trained: int, width: int, vocabulary: int) -> list[Draw]:
    """Micro-batches, with values that bf16 can represent."""
    found = []
    for _ in range(count):
        index = torch.randperm(positions)[:trained].sort().values
        hidden = torch.randn(positions, width).bfloat16().float()
        found.append((hidden, index, torch.randint(vocabulary, (trained,))))
    return found


def gradients(head: Head, batches: list[Draw], chunk: int, *, by_autograd: bool) -> tuple[float, list[torch.Tensor]]:
    """The loss of a step, and the gradients of its hidden states and of the head; or as autograd computes them."""
    head.layer.zero_grad()
    dtype, total = next(head.layer.parameters()).dtype, 0.0
    found: list[torch.Tensor] = []
    tokens = sum(len(index) for _, index, _ in batches)
    for values, index, targets in batches:
        hidden = values.to(dtype).requires_grad_()
        if by_autograd:
            parts = zip(hidden[index].split(chunk), targets.split(chunk), strict=True)
            losses = [F.cross_entropy(head.logits(part), ids, reduction="sum") for part, ids in parts]
            loss = torch.stack(losses).sum() / tokens
        else:
            loss = summed_head_loss(head, hidden, index, targets, chunk, tokens)
        (2 * loss).backward()
        assert hidden.grad is not None
        total, found = total + loss.item(), [*found, hidden.grad]
    return total, [*found, *(p.grad for p in head.layer.parameters() if p.grad is not None)]


def frozen(layer: nn.Module) -> nn.Module:
    return layer.requires_grad_(False)


@pytest.mark.parametrize(
    ("layer", "changes"),
    [
        pytest.param(lambda: nn.Linear(16, 40, bias=False), {}, id="trained"),
        pytest.param(lambda: frozen(nn.Linear(16, 40)), {}, id="frozen"),
        pytest.param(lambda: nn.Linear(16, 40), {"cap": 0.7, "factor": 2.5, "vocabulary": 37}, id="bias, cap, padding"),
        pytest.param(lambda: nn.Sequential(frozen(nn.Linear(16, 3)), nn.Linear(3, 40)), {}, id="several layers"),
    ],
)
def test_loss_and_gradients_are_those_of_autograd(layer, changes):
    """A factor, cap or row that the loss includes and its gradient does not; one chunk counted twice."""
    torch.manual_seed(0)
    head = head_of(layer(), **changes)
    batches = draws(3, positions=50, trained=23, width=16, vocabulary=37)
    expected_loss, expected = gradients(head, batches, 5, by_autograd=True)
    loss, found = gradients(head, batches, 5, by_autograd=False)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).norm() <= 1e-6 * theirs.norm()
    losses = head.losses(*batches[0], 5)
    torch.testing.assert_close(
        losses, F.cross_entropy(head.logits(batches[0][0][batches[0][1]]), batches[0][2], reduction="none")
    )


def test_gradients_in_bf16_are_as_near_to_fp64_as_those_of_autograd():
    """A sum over all chunks of a step, which bf16 rounds after each: twice the error of the weight's gradient."""
    torch.manual_seed(0)
    head = head_of(nn.Linear(64, 512, bias=False).bfloat16())
    batches = draws(8, positions=128, trained=128, width=64, vocabulary=512)
    errors = {}
    results = {way: gradients(head, batches, 16, by_autograd=way) for way in (True, False)}
    head.layer.double()
    _, exact = gradients(head, batches, 16, by_autograd=True)
    for way, (_, found) in results.items():
        errors[way] = [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True)]
    assert all(ours <= 1.01 * theirs for ours, theirs in zip(errors[False], errors[True], strict=True)), errors


def test_small_gradients_do_not_vanish_in_fp16():
    """Gradients below 6e-8, the smallest that fp16 has: the loss scale must come before they are rounded."""
    torch.manual_seed(0)
    ((hidden, index, targets),) = draws(1, positions=8, trained=8, width=32, vocabulary=64)
    found: dict[torch.dtype, torch.Tensor] = {}
    for dtype, scale in ((torch.float64, 1.0), (torch.float16, 2.0**16)):
        torch.manual_seed(0)
        layer = nn.Linear(32, 64, bias=False).to(dtype)
        inputs = hidden.to(dtype).requires_grad_()
        summed_head_loss(head_of(layer), inputs, index, targets, 4, 1e9 / scale).backward()
        assert inputs.grad is not None
        found[dtype] = inputs.grad.double() / scale
    exact = found[torch.float64]
    assert exact.abs().max() < 6e-8
    assert (found[torch.float16] - exact).norm() < 0.01 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_chunk_has_one_copy_of_its_logits_and_a_micro_batch_one_gradient_of_the_head(dtype, monkeypatch):
    """Logits, their softmax and its gradient at once; the head's gradients of each chunk beside their sum."""
    monkeypatch.setattr(head_loss, "BLOCK_BYTES", 2 * 4096 * 4)
    torch.manual_seed(0)
    head = head_of(nn.Linear(64, 4096, bias=False).to(dtype))
    assert isinstance(head.layer, nn.Linear)
    batches = draws(2, positions=64, trained=64, width=64, vocabulary=4096)
    logits_bytes, head_bytes = 32 * 4096 * dtype.itemsize, head.layer.weight.nbytes
    slack = 2 * 64 * 64 * 4 + 4 * head_loss.BLOCK_BYTES
    assert slack < logits_bytes
    for hidden, index, targets in batches:
        inputs, meter = hidden.to(dtype).requires_grad_(), make_meter(CPU)
        with meter.window("step"), without_onednn():
            summed_head_loss(head, inputs, index, targets, 32, 128).backward()
        assert (peak := meter.result().peak_bytes) is not None
        assert logits_bytes + head_bytes <= peak < logits_bytes + head_bytes + slack


def test_blocks_change_no_bit(monkeypatch):
    """Rows whose maximum or sum is taken over another block's."""
    torch.manual_seed(0)
    head = head_of(nn.Linear(16, 40, bias=False).bfloat16(), cap=3.0)
    batches = draws(1, positions=50, trained=23, width=16, vocabulary=40)
    whole = gradients(head, batches, 23, by_autograd=False)
    whole = whole[0], [gradient.clone() for gradient in whole[1]]
    monkeypatch.setattr(head_loss, "BLOCK_BYTES", 5 * 40 * 4)
    loss, found = gradients(head, batches, 23, by_autograd=False)
    assert loss == whole[0] and all(map(torch.equal, found, whole[1]))
