"""Values of integers in a trace, which decide what towers of images do."""

import torch

from lean_finetune.memory.trace.known_values import KnownValuesMode


def test_values_of_small_results_are_kept_and_large_ones_are_never_computed():
    """A mask of rows of a million tokens, which took its terabyte in the memory of this machine."""
    small, large = torch.arange(8), torch.arange(1 << 20)
    with KnownValuesMode() as mode:
        kept = mode.known(small)
        assert (kept[:, None] <= kept).sum().item() == 36
        unread = mode.known(large)
        assert (unread[:, None] <= unread).shape == (1 << 20, 1 << 20)
