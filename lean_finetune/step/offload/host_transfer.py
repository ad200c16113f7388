"""Copy gradients to host memory and weights back, for updates on the host (train.offload=optimizer)."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch

from lean_finetune.config.field_types import OffloadState, OffloadTo
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

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        dtype: torch.dtype | None,
        on_host: HostContext = nullcontext,
        room: torch.Tensor | None = None,
    ):
        """Allocate space for the gradients of `parameters`; `dtype` is the type of their copies, None for their own.

        `room` is memory (bytes) for the largest part of a gradient that is copied at once; None: for all of it.
        """
        self.on_host = on_host
        tensors = list(parameters)
        gradient = max(tensor.numel() * (dtype or tensor.dtype).itemsize for tensor in tensors)
        staging = min(STAGING_BYTES, max(tensor.nbytes for tensor in tensors))
        pinned = tensors[0].device.type == "cuda"
        with on_host():
            self._gradient = torch.empty(gradient, dtype=torch.uint8, device="cpu") if room is None else room
            self._staging = torch.empty(staging, dtype=torch.uint8, device="cpu", pin_memory=pinned)

    @property
    def buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The host memory in use: the space for a gradient, and the staging buffer."""
        return self._gradient, self._staging

    def to_host(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A device tensor in host memory in this type, valid until the next call."""
        host = self._gradient[: values.numel() * dtype.itemsize].view(dtype)
        staging = self._staging_of(values.dtype)
        flat = values.detach().view(-1)
        for source, target in zip(flat.split(len(staging)), host.split(len(staging)), strict=True):
            target.copy_(staging[: len(source)].copy_(source))
        return host.view(values.shape)

    def to_device(self, values: torch.Tensor, target: torch.Tensor) -> None:
        """Overwrite a device tensor with host values, rounded to its type."""
        staging = self._staging_of(target.dtype)
        flat = target.detach().view(-1)
        for source, place in zip(values.detach().view(-1).split(len(staging)), flat.split(len(staging)), strict=True):
            place.copy_(staging[: len(source)].copy_(source))

    def _staging_of(self, dtype: torch.dtype) -> torch.Tensor:
        """The staging buffer as values of this type."""
        return self._staging[: len(self._staging) // dtype.itemsize * dtype.itemsize].view(dtype)


def refuse_offloaded_state(choice: OffloadState, place: OffloadTo, device_type: str) -> None:
    """Raise UserError if training on a CPU would offload to the host what is already there."""
    if device_type == "cpu" and choice != "none" and (choice, place) != ("optimizer", "disk"):
        what = "optimizer takes its state" if choice == "optimizer" else "parameters takes weights"
        raise UserError(f"train.offload: {what} off a GPU; got {choice} where training runs on the CPU; use none")
