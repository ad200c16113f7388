"""The weights of a micro-batch.

Shape: N trained tokens.
"""

from dataclasses import dataclass

import numpy as np
import torch

from lean_finetune.rows.batch_part import BatchPart


@dataclass(frozen=True, eq=False)
class WeightPart(BatchPart):
    """The weight of each trained token: that of its row."""

    weights_N: torch.Tensor
    """fp32, in the order of `Batch.supervised_index_N`."""

    def to(self, device: torch.device | str) -> "WeightPart":
        """See the base class."""
        return WeightPart(self.weights_N.to(device, non_blocking=self.weights_N.is_pinned()))

    def pinned(self) -> "WeightPart":
        """See the base class."""
        return WeightPart(self.weights_N.pin_memory())

    def of_tokens(self, chosen_N: np.ndarray) -> "WeightPart":
        """See the base class."""
        return WeightPart(torch.from_numpy(self.weights_N.numpy()[chosen_N]))

    @property
    def token_weights_N(self) -> torch.Tensor:
        """See the base class."""
        return self.weights_N
