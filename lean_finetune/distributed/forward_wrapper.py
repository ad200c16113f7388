"""Modules that FSDP2 needs around the model and around its shards."""

from collections.abc import Callable
from typing import Any

from torch import nn


class ForwardWrapper(nn.Module):
    """A module whose forward calls a function with the model.

    FSDP2 gathers weights when a module's call begins, and sums gradients when its backward ends. The loss reads the
    head's weight outside of the model's own forward (chunk by chunk, and again in backward), so one call must hold all.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[nn.Module], Any]) -> Any:
        """Return what `compute` returns."""
        return compute(self.model)


class LocalParameters(nn.Module):
    """The parameters that one process updates, as a module."""

    def __init__(self, parameters: list[nn.Parameter]):
        super().__init__()
        self.parameter_list = nn.ParameterList(parameters)
