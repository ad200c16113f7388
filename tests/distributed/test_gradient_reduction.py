"""Gradient all-reduce: buckets, sums, and missing gradients."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from lean_finetune.core.errors import UserError
from lean_finetune.distributed.replicated import PACKED_BYTES, GradientReducer
from lean_finetune.step.parallel_model import named_trained

LARGE = PACKED_BYTES // 4 + 1
"""Values in fp32."""


class Tower(nn.Module):
    """An embedding, two layers of a large and two small tensors, and a head that is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.ones(LARGE))
        self.layers = nn.ModuleList(nn.ParameterList(torch.ones(n) for n in (LARGE, 3, 5)) for _ in range(2))
        self.head = nn.Parameter(torch.ones(7))

    def forward(self, head: bool) -> torch.Tensor:
        total = self.embedding.sum()
        for part in self.layers.parameters():
            total = total + (part * part).sum()
        return total + self.head.sum() if head else total


def gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


@pytest.fixture
def group() -> Iterator[None]:
    """Two processes, of which the other sends nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def test_gradients_are_those_of_one_process_and_large_ones_are_not_copied(group: None):
    """Parts of a bucket that belong to another tensor; a second copy of a large gradient."""
    model, alone = Tower(), Tower()
    reducer = GradientReducer(named_trained(model))
    for turn in range(2):
        alone(head=True).backward()
        if turn == 0:
            model(head=True).backward()
            places = {name: gradient_of(parameter).data_ptr() for name, parameter in named_trained(model)}
        else:
            with reducer.reducing():
                model(head=False).backward()  # The head has a gradient of the earlier turn.
                gradient_of(alone.head).sub_(1)
    for (name, found), (_, wanted) in zip(named_trained(model), named_trained(alone), strict=True):
        assert torch.equal(gradient_of(found), gradient_of(wanted))
        assert (gradient_of(found).data_ptr() == places[name]) == (found.numel() == LARGE or name == "head")


def test_a_tensor_that_gets_no_gradient_is_refused(group: None):
    """Other processes would wait forever, or take the next gradient for it."""
    model = Tower()
    reducer = GradientReducer(named_trained(model))
    with pytest.raises(UserError, match="ddp and zero1 sum the gradients of all trained tensors; head got none"):
        with reducer.reducing():
            model(head=False).backward()
