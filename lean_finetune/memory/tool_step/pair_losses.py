"""The losses of preference pairs of other tools: which tensors they make, and until when each lives.

Shapes: B rows, the chosen answers before the rejected ones, T tokens, D hidden size, V vocabulary, N scored tokens.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lean_finetune.memory.tool_step.losses import measure_entropy
from lean_finetune.memory.tool_step.tool_step import Loss, ToolStep

TILE_TOKENS, TILE_VOCABULARY = 4096, 32768
"""The tiles in which TRL 1.16 computes log-probabilities."""
Kept = list[torch.Tensor]
"""Tensors that live until the loss is known."""
Score = Callable[[ToolStep, nn.Module, torch.Tensor, torch.Tensor], tuple[torch.Tensor, Kept]]
"""Of a head, hidden states and labels: the sums of log-probabilities of each row, and what lives on."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The model that a loss of pairs compares with."""

    hidden: Callable[[], tuple[nn.Module, torch.Tensor]]
    """Computes its head and its hidden states."""
    phase: Callable[[], AbstractContextManager[None]]
    """Begins its phase of the trace."""


def pair_loss_of(
    step: ToolStep, head: nn.Module, hidden_BTD: torch.Tensor, labels_BT: torch.Tensor, reference: Reference | None
) -> torch.Tensor:
    """The loss of a micro-batch of pairs, an fp32 scalar."""
    score = PAIR_LOSSES[step.loss]
    sums_B, kept = score(step, head, hidden_BTD, labels_BT)
    with nullcontext() if reference is None else reference.phase():
        reference_kept: Kept = []
        if reference is not None:
            with torch.no_grad():
                reference_B, reference_kept = score(step, *reference.hidden(), labels_BT)
            sums_B = sums_B - reference_B
        chosen, rejected = sums_B.chunk(2)
        loss = -F.logsigmoid(chosen - rejected).mean()
        if step.loss == "pairs_by_rows":
            measure_entropy(kept[0].detach())
        del reference_kept
    return loss


def _logits(step: ToolStep, head: nn.Module, hidden_BTD: torch.Tensor) -> torch.Tensor:
    """The logits that the model returns."""
    logits_BTV = head(hidden_BTD)
    return logits_BTV.float() if step.outputs_in_fp32 else logits_BTV


def _by_rows(
    step: ToolStep, head: nn.Module, hidden_BTD: torch.Tensor, labels_BT: torch.Tensor
) -> tuple[torch.Tensor, Kept]:
    """TRL up to 1.10. Of fp32 logits, it computes the sums of exponentials; of others, a log-softmax of each row."""
    logits_BTV = _logits(step, head, hidden_BTD)
    shifted_BTV, labels_BT1 = logits_BTV[..., :-1, :], labels_BT[..., 1:, None]
    if logits_BTV.dtype == torch.float32:
        chosen_BT = shifted_BTV.gather(-1, labels_BT1).squeeze(-1)
        return (chosen_BT - torch.stack([row.logsumexp(-1) for row in shifted_BTV])).sum(1), [logits_BTV]
    rows = [
        row.log_softmax(-1).gather(-1, labels).squeeze(-1) for row, labels in zip(shifted_BTV, labels_BT1, strict=True)
    ]
    return torch.stack(rows).sum(1), [logits_BTV]


def _log_softmax(
    step: ToolStep, head: nn.Module, hidden_BTD: torch.Tensor, labels_BT: torch.Tensor
) -> tuple[torch.Tensor, Kept]:
    """LLaMA-Factory: fp32 logits and their log-softmax. The logits live until they are measured."""
    logits_BTV = _logits(step, head, hidden_BTD).float()
    logs_BTV = logits_BTV[..., :-1, :].log_softmax(-1)
    return logs_BTV.gather(-1, labels_BT[..., 1:, None]).squeeze(-1).sum(1), [logits_BTV]


def _in_tiles(
    step: ToolStep, head: nn.Module, hidden_BTD: torch.Tensor, labels_BT: torch.Tensor
) -> tuple[torch.Tensor, Kept]:
    """TRL 1.16: tiles of logits, computed again in backward."""
    shifted_BTD = hidden_BTD[:, :-1]
    scored_N = torch.empty(shifted_BTD[..., 0].numel(), dtype=torch.int64)
    hidden_ND = shifted_BTD.reshape(-1, shifted_BTD.shape[-1]).index_select(0, scored_N)
    logps_N: torch.Tensor = _Tiles.apply(hidden_ND, head.weight)
    return logps_N.view(shifted_BTD.shape[:2]).sum(1), []


class _Tiles(torch.autograd.Function):
    """Log-probabilities from tiles of tokens and vocabulary; gradients are summed in fp32."""

    @staticmethod
    def forward(ctx: Any, hidden_ND: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else hidden_ND.dtype
        statistics = [hidden_ND.new_zeros(len(hidden_ND), dtype=torch.float32) for _ in range(7)]
        _tile(hidden_ND, weight_VD, dtype)
        ctx.save_for_backward(hidden_ND, weight_VD, *statistics[:2])
        ctx.dtype = dtype
        return statistics[2] - statistics[3]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_ND, weight_VD, *_ = ctx.saved_tensors
        hidden, weight = ctx.needs_input_grad
        gradient_ND = torch.zeros_like(hidden_ND, dtype=torch.float32) if hidden else None
        gradient_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if weight else None
        _tile(hidden_ND, weight_VD, ctx.dtype)
        return (
            None if gradient_ND is None else gradient_ND.to(hidden_ND.dtype),
            None if gradient_VD is None else gradient_VD.to(weight_VD.dtype),
        )


def _tile(hidden_ND: torch.Tensor, weight_VD: torch.Tensor, dtype: torch.dtype) -> None:
    """Allocate and free what one tile needs; the others are alike."""
    tile = hidden_ND.new_empty((min(len(hidden_ND), TILE_TOKENS), TILE_VOCABULARY), dtype=dtype)
    columns = weight_VD[:TILE_VOCABULARY].to(dtype)
    rows = hidden_ND[:TILE_TOKENS].to(dtype)
    del tile, columns, rows


PAIR_LOSSES: dict[Loss, Score] = {
    "pairs_by_rows": _by_rows,
    "pairs_log_softmax": _log_softmax,
    "pairs_in_tiles": _in_tiles,
}
