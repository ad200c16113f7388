"""Context parallelism: every row's tokens are split across processes, and so are the heads within attention.

Each process has a part of the tokens. Before attention an all-to-all exchanges tokens for heads, so that a process has
all tokens of a part of the heads; after attention another one reverses that. So any attention kernel works, on complete
rows, and all processes do equal work. Source: DeepSpeed Ulysses, Jacobs et al. 2023, arXiv 2309.14509.

Shape legend: B rows, H heads, T tokens of a complete row, t tokens of it in this process, D head size, N processes.
"""

from typing import Any

import torch
import torch.distributed as dist

from lean_finetune.model.attention.kernels import TokenExchange


class HeadExchange(TokenExchange):
    """Exchanges between the processes of a group, which have consecutive parts of each row in the order of ranks."""

    def __init__(self, group: dist.ProcessGroup):
        """All processes of `group` make the same calls in the same order."""
        super().__init__(parts=group.size(), index=group.rank())
        self._group = group

    def to_heads(self, heads_BHtD: torch.Tensor) -> torch.Tensor:
        """(B, H, t, D) → (B, H / N, T, D)."""
        found: torch.Tensor = _AllToAll.apply(heads_BHtD.transpose(1, 2), 2, 1, self._group)
        return found.transpose(1, 2)

    def to_tokens(self, out_BTHD: torch.Tensor) -> torch.Tensor:
        """(B, T, H / N, D) → (B, t, H, D)."""
        found: torch.Tensor = _AllToAll.apply(out_BTHD, 1, 2, self._group)
        return found


class _AllToAll(torch.autograd.Function):
    """Splits one dimension across the processes, and joins another one from their parts."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, divided: int, joined: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.dimensions, ctx.group = (divided, joined), group
        return _all_to_all(tensor, divided, joined, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        divided, joined = ctx.dimensions
        return _all_to_all(gradient, joined, divided, ctx.group), None, None, None


def _all_to_all(tensor: torch.Tensor, divided: int, joined: int, group: dist.ProcessGroup) -> torch.Tensor:
    # all_to_all_single sends equal parts along the first dimension.
    sent = tensor.unflatten(divided, (group.size(), -1)).movedim(divided, 0).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    # Freed before the last line, which copies.
    del sent
    return received.movedim(0, joined).flatten(joined, joined + 1)
