"""The way between a device and the host's memory for updates that are made there (train.offload=optimizer)."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch

from lean_finetune.config.field_types import OffloadState
from lean_finetune.core.errors import UserError

STAGING_BYTES = 64 * 2**20
"""Of the page-locked buffer through which tensors travel: large enough for the full speed of the link."""

HostContext = Callable[[], AbstractContextManager[object]]
"""Opens a stretch in which what is made is the host's: a trace must not count it for the device."""


class HostTransfer:
    """Takes gradients to the host and weights back, one tensor at a time through one buffer.

    All of the host's memory that this takes is made at the start: the buffer, and room for the largest gradient. On
    the device it takes nothing.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], dtype: torch.dtype, on_host: HostContext = nullcontext):
        """Make room for the gradients of `parameters` as `dtype`, that of their copies on the host."""
        self.on_host = on_host
        tensors = list(parameters)
        largest = max(tensors, key=lambda tensor: tensor.numel())
        with on_host():
            self._gradient = torch.empty(largest.numel(), dtype=dtype, device="cpu")
            size = min(STAGING_BYTES, largest.nbytes)
            self._staging = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=largest.device.type == "cuda")

    @property
    def buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The host's memory that this holds: room for a gradient, and what tensors travel through."""
        return self._gradient, self._staging

    def fetch(self, values: torch.Tensor) -> torch.Tensor:
        """Values of the device in the host's room for them; they are gone with the next call."""
        host = self._gradient[: values.numel()]
        staging = self._staging.view(values.dtype)
        flat = values.detach().view(-1)
        for source, target in zip(flat.split(len(staging)), host.split(len(staging)), strict=True):
            target.copy_(staging[: len(source)].copy_(source))
        return host.view(values.shape)

    def give(self, values: torch.Tensor, target: torch.Tensor) -> None:
        """Write values of the host over a tensor of the device, rounded to its type."""
        staging = self._staging.view(target.dtype)
        flat = target.detach().view(-1)
        for source, place in zip(values.detach().view(-1).split(len(staging)), flat.split(len(staging)), strict=True):
            place.copy_(staging[: len(source)].copy_(source))


def refuse_offloaded_state(choice: OffloadState, device_type: str) -> None:
    """Refuse to keep on the host what is there anyway.

    Raises:
        UserError: training runs on a CPU.
    """
    if choice != "none" and device_type == "cpu":
        what = "optimizer takes its state" if choice == "optimizer" else "parameters takes weights"
        raise UserError(f"train.offload: {what} off a GPU; got {choice} where training runs on the CPU; use none")
