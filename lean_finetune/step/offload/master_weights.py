"""Master weights: copies that take the updates, in fp32, in host memory, or both.

fp32 copies of 16-bit weights: Micikevicius et al. 2018, arXiv 1710.03740, section 3.1. Copies and update in host
memory: Ren et al. 2021, arXiv 2101.06840.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch

from lean_finetune.step.offload.host_transfer import HostTransfer

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
                master.grad = parameter.grad.float()
            else:
                master.grad = self.link.to_host(parameter.grad, master.dtype)
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
