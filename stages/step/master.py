"""fp32 copies of 16-bit weights, which take the updates (Micikevicius et al. 2018, arXiv 1710.03740, section 3.1)."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

Groups = list[dict[str, Any]]


class MasterWeights(torch.optim.Optimizer):
    """An optimizer over fp32 copies: each is updated, then rounded to the weight that is trained.

    Tensor by tensor, each gradient given up once its fp32 copy is made: a step needs no more than its largest tensor.
    """

    def __init__(self, groups: Groups, lr: float, build: Callable[[Groups], torch.optim.Optimizer]):
        """Copy the weights as they are; `build` makes the optimizer of the copies."""
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        copies: Groups = []
        for group in self.param_groups:
            masters = [torch.nn.Parameter(p.detach().float()) for p in group["params"]]
            copies.append({"params": masters, "weight_decay": group["weight_decay"]})
            for parameter, master in zip(group["params"], masters, strict=True):
                self.state[parameter] = {"master": master}
        self.inner = build(copies)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every weight that has a gradient."""
        whole = self.inner.param_groups
        try:
            for group, inner_group in zip(self.param_groups, whole, strict=True):
                inner_group["lr"] = group["lr"]
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._update(parameter, inner_group)
        finally:
            self.inner.param_groups = whole

    def _update(self, parameter: torch.nn.Parameter, inner_group: Mapping[str, Any]) -> None:
        """One tensor."""
        master = self.state[parameter]["master"]
        assert parameter.grad is not None
        master.grad, parameter.grad = parameter.grad.float(), None
        self.inner.param_groups = [{**inner_group, "params": [master]}]
        self.inner.step()
        master.grad = None
        parameter.copy_(master)

    def state_dict(self) -> dict[str, Any]:
        """The copies in order, and the state of their optimizer."""
        return {"masters": [master.detach() for master in self._masters()], "inner": self.inner.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Put back what `state_dict` gave; PyTorch's own would round the copies to the weights' type."""
        for master, saved in zip(self._masters(), state_dict["masters"], strict=True):
            master.copy_(saved)
        self.inner.load_state_dict(state_dict["inner"])

    def _masters(self) -> Iterable[torch.nn.Parameter]:
        """The copies in the order of the weights."""
        return (self.state[parameter]["master"] for group in self.param_groups for parameter in group["params"])
