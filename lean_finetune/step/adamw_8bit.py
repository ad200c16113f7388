"""bitsandbytes' AdamW8bit, whose update on a GPU is one kernel of ours a tensor (`model/kernels/adamw_8bit_kernel.py`).

State, code books and saved files are those of bitsandbytes, so a run may go on with either update. Ours rounds a 16-bit
weight once, with its decay; bitsandbytes' kernel rounds it before the decay and after it.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import bitsandbytes as bnb
import torch

from lean_finetune.model.kernels.triton_kernels import has_triton_kernels


class AdamW8bit(bnb.optim.AdamW8bit):
    """AdamW with moments of one byte a value; tensors below `min_8bit_size` values have fp32 moments."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter with a gradient; bitsandbytes' step waits for the GPU after each."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group_index, group in enumerate(self.param_groups):
            for index, parameter in enumerate(group["params"]):
                if parameter.grad is None:
                    continue
                if not self.state[parameter]:
                    self.init_state(group, parameter, group_index, index)
                self.update_step(group, parameter, group_index, index)
        return loss

    @torch.no_grad()
    def update_step(self, group: dict[str, Any], p: torch.nn.Parameter, gindex: int, pindex: int) -> None:
        """Update one parameter."""
        state = self.state[p]
        if state["state1"].dtype != torch.uint8 or not has_triton_kernels(p.device):
            super().update_step(group, p, gindex, pindex)
            return
        p.data, p.grad = p.data.contiguous(), p.grad.contiguous()  # type: ignore[union-attr]
        state["step"] += 1
        update(p, p.grad, state, group)


def update(parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """Update a parameter and its 8-bit state in place, by the kernel; all tensors are contiguous."""
    launch, block, warps = _kernel()
    lr, (beta1, beta2), step = group["lr"], group["betas"], state["step"]
    correction = math.sqrt(1.0 - beta2**step)
    values = parameter.numel()
    launch[(-(-values // (block * warps)),)](
        parameter,
        gradient,
        state["state1"],
        state["state2"],
        state["absmax1"],
        state["absmax2"],
        values,
        1.0 - lr * group["weight_decay"],
        lr * correction / (1.0 - beta1**step),
        group["eps"] * correction,
        beta1,
        beta2,
        1.0 - beta1,
        1.0 - beta2,
        BLOCK=block,
        WARPS=warps,
        num_warps=warps,
    )


@cache
def _kernel() -> tuple[Any, int, int]:
    """The kernel, the values of its blocks and its warps; it imports Triton."""
    from lean_finetune.model.kernels import adamw_8bit_kernel as code

    return code.adamw_8bit_kernel, code.BLOCK, code.WARPS
