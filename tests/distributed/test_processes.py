"""Ranks, owners of tensors, and refusals before training."""

import pytest
import torch

from lean_finetune.core.errors import UserError
from lean_finetune.distributed.processes import SINGLE_PROCESS, World, check_size
from lean_finetune.step.parallel_model import ParallelModel, assign_owners


def test_processes_that_do_not_match_the_plan_are_refused(monkeypatch: pytest.MonkeyPatch):
    """Torchrun started by hand with another number: some rows would never be trained."""
    assert World.here() == SINGLE_PROCESS
    for name, value in {"RANK": 1, "WORLD_SIZE": 3, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 3}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "by hand")
    world = World.here()
    assert world == World(rank=1, size=3, local_rank=1, local_size=3) and not world.is_first
    check_size(world, 3)
    with pytest.raises(UserError, match=r"num_gpus: .* got 2 where torchrun started 3; set hardware\.num_gpus=3"):
        check_size(world, 2)


def test_owners_share_the_state_evenly():
    """With one owner of most tensors, zero1 would divide no state."""
    sizes = [50, 7, 7, 30, 20, 1, 1]
    owners = assign_owners(sizes, 2)
    load = [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in (0, 1)]
    assert sorted(load) == [58, 58]
    with pytest.raises(UserError, match=r"zero1 gives each GPU whole tensors .* got 7 trained tensors for 8 GPUs; use"):
        assign_owners(sizes, 8)


class Pair(ParallelModel):
    """The second of two whose other member has a loss of 5 in each turn."""

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Fill in the losses of the other process."""
        values[:, 0] = 5.0
        return values


def test_losses_are_in_the_order_of_the_plan():
    """A loss that is not finite is reported with the rows of its micro-batch."""
    pair = Pair(torch.nn.Linear(1, 1), rank=1, size=2)
    losses = pair.losses_of_all_ranks([torch.tensor(1.0), torch.tensor(2.0)])
    assert [loss.item() for loss in losses] == [5.0, 1.0, 5.0, 2.0]
