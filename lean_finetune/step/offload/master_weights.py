"""Master weights and optimizer state on the device or in host memory."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

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
            # In the device's type over the link: it has no more bits than the host's.
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


# Master weights: copies that take the updates, in fp32, in host memory, or both.
#
# fp32 copies of 16-bit weights: Micikevicius et al. 2018, arXiv 1710.03740, section 3.1. Copies and update in host
# memory: Ren et al. 2021, arXiv 2101.06840.

Groups = list[dict[str, Any]]


class MasterWeights(torch.optim.Optimizer):
    """An optimizer that updates copies of the weights, then rounds each copy to its weight.

    It works tensor by tensor and frees each gradient once it is copied: a step needs no more than the largest tensor.
    """

    def __init__(
        self,
        groups: Groups,
        lr: float,
        build: Callable[[Groups], torch.optim.Optimizer],
        *,
        dtype: torch.dtype | None,
        link: HostTransfer | None = None,
    ):
        """Copy the weights of `groups` to `dtype`; None for their own types.

        `build` makes the optimizer of the copies. With `link`, copies and update are on the host, else on the device.
        """
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        self.link = link
        self._on_host = nullcontext if link is None else link.on_host
        self._inner_group: dict[torch.Tensor, int] = {}
        copies: Groups = []
        with self._on_host():
            for number, group in enumerate(self.param_groups):
                masters = [self._copied(parameter, dtype) for parameter in group["params"]]
                copies.append({"params": masters, "weight_decay": group["weight_decay"]})
                for parameter, master in zip(group["params"], masters, strict=True):
                    self.state[parameter] = {"master": master}
                    self._inner_group[parameter] = number
            self.inner = build(copies)

    def _copied(self, parameter: torch.Tensor, dtype: torch.dtype | None) -> torch.nn.Parameter:
        """A copy of a weight on the device of the update."""
        device = parameter.device if self.link is None else torch.device("cpu")
        return torch.nn.Parameter(parameter.detach().to(device=device, dtype=dtype or parameter.dtype, copy=True))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every weight with a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group["lr"])

    def _update(self, parameter: torch.nn.Parameter, lr: float) -> None:
        """Update one tensor: the inner optimizer sees a group of this tensor alone."""
        master = self.state[parameter]["master"]
        groups = self.inner.param_groups
        with self._on_host():
            assert parameter.grad is not None
            if self.link is None:
                master.grad = parameter.grad.float()  # On the device, master weights are fp32.
            else:
                master.grad = self.link.to_host(parameter.grad, master.dtype)
        # Freed as soon as it is copied, before the update needs memory.
        parameter.grad = None
        with self._on_host():
            self.inner.param_groups = [{**groups[self._inner_group[parameter]], "lr": lr, "params": [master]}]
            try:
                self.inner.step()
            finally:
                self.inner.param_groups = groups
            master.grad = None
            if self.link is None:
                parameter.copy_(master)
            else:
                self.link.to_device(master, parameter)

    def state_dict(self) -> dict[str, Any]:
        """The copies, in order, and the state of their optimizer."""
        return {"masters": [master.detach() for master in self._masters()], "inner": self.inner.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned; PyTorch's own method would round the copies to the weights' type."""
        for master, saved in zip(self._masters(), state_dict["masters"], strict=True):
            master.copy_(saved)
        self.inner.load_state_dict(state_dict["inner"])

    def _masters(self) -> Iterable[torch.nn.Parameter]:
        """The copies in the order of the weights."""
        return (self.state[parameter]["master"] for group in self.param_groups for parameter in group["params"])
