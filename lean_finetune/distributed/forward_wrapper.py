"""A model inside a module whose forward runs whatever is asked of it.

FSDP2 acts on a module's call: weights are gathered when it begins, and gradients summed when its backward ends. The
loss reads the head's weight beside the model's own forward pass (chunk by chunk, and again in backward), so all of it
has to happen inside one call.
"""

from collections.abc import Callable
from typing import Any

from torch import nn


class Whole(nn.Module):
    """Calls a function with the model, as a forward pass."""

    def __init__(self, model: nn.Module):
        """Hold `model`."""
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[nn.Module], Any]) -> Any:
        """What `compute` returns of the model."""
        return compute(self.model)


class Parts(nn.Module):
    """Parameters without a model: what one process updates."""

    def __init__(self, parameters: list[nn.Parameter]):
        """Hold `parameters` in order."""
        super().__init__()
        self.parts = nn.ParameterList(parameters)
