"""Copy gradients to host memory and weights back, for updates on the host (train.offload=optimizer)."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch

from lean_finetune.config.field_types import OffloadState
from lean_finetune.core.errors import UserError

STAGING_BYTES = 64 * 2**20
"""Size of the page-locked staging buffer: large enough for the full bandwidth of the link."""

HostContext = Callable[[], AbstractContextManager[object]]
"""Opens a context for host allocations, which a memory trace must not count for the device."""


class HostTransfer:
    """Copies one tensor at a time through one staging buffer.

    It allocates all its host memory at the start: the buffer, and space for the largest gradient. It needs no device
    memory.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], dtype: torch.dtype, on_host: HostContext = nullcontext):
        """Allocate space for the gradients of `parameters`; `dtype` is the type of the master weights."""
        self.on_host = on_host
        tensors = list(parameters)
        largest = max(tensors, key=lambda tensor: tensor.numel())
        with on_host():
            self._gradient = torch.empty(largest.numel(), dtype=dtype, device="cpu")
            size = min(STAGING_BYTES, largest.nbytes)
            self._staging = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=largest.device.type == "cuda")

    @property
    def buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The host memory in use: the space for a gradient, and the staging buffer."""
        return self._gradient, self._staging

    def to_host(self, values: torch.Tensor) -> torch.Tensor:
        """A device tensor in host memory, valid until the next call."""
        host = self._gradient[: values.numel()]
        staging = self._staging.view(values.dtype)
        flat = values.detach().view(-1)
        for source, target in zip(flat.split(len(staging)), host.split(len(staging)), strict=True):
            target.copy_(staging[: len(source)].copy_(source))
        return host.view(values.shape)

    def to_device(self, values: torch.Tensor, target: torch.Tensor) -> None:
        """Overwrite a device tensor with host values, rounded to its type."""
        staging = self._staging.view(target.dtype)
        flat = target.detach().view(-1)
        for source, place in zip(values.detach().view(-1).split(len(staging)), flat.split(len(staging)), strict=True):
            place.copy_(staging[: len(source)].copy_(source))


def refuse_offloaded_state(choice: OffloadState, device_type: str) -> None:
    """Raise UserError if training on a CPU would offload to the host what is already there."""
    if choice != "none" and device_type == "cpu":
        what = "optimizer takes its state" if choice == "optimizer" else "parameters takes weights"
        raise UserError(f"train.offload: {what} off a GPU; got {choice} where training runs on the CPU; use none")
