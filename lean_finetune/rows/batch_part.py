"""What a batch has of an attachment, as tensors for the model or for the objective."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, Self

import numpy as np
import torch


class BatchPart(ABC):
    """Tensors of what the rows of a micro-batch carry besides tokens."""

    @abstractmethod
    def to(self, device: torch.device | str) -> Self:
        """The same on another device; copies from pinned memory are asynchronous."""

    @abstractmethod
    def pinned(self) -> Self:
        """The same in page-locked memory."""

    def of_tokens(self, chosen_N: np.ndarray) -> Self | None:
        """Select what belongs to trained tokens, by a bool mask of shape (N,); None if they need nothing of it."""
        return None

    @property
    def token_weights_N(self) -> torch.Tensor | None:
        """A weight for each of N trained tokens, fp32, in the order of `Batch.supervised_index_N`; None without any."""
        return None

    @property
    def arguments(self) -> Mapping[str, torch.Tensor]:
        """Arguments of the complete model without its head; without any in a batch, the decoder alone is called."""
        return {}

    @property
    def masks(self) -> bool:
        """Whether the model's own masks hold for these rows."""
        return False

    def inputs(self, lm: Any, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The decoder's `inputs`, changed by what passes through other parts of the model."""
        return inputs


def weights_of(parts: Iterable[BatchPart]) -> torch.Tensor | None:
    """The weights of trained tokens, fp32 (N,); None if each has weight 1."""
    return next((found for part in parts if (found := part.token_weights_N) is not None), None)
