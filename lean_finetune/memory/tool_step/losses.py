"""The losses of other tools: which tensors they make, and until when each lives.

Shapes: B rows, T tokens, D hidden size, V vocabulary, M = B × T positions.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lean_finetune.memory.tool_step.tool_step import Loss, ToolStep

CHUNK_TOKENS = 256
"""Tokens of a chunk of TRL's chunked loss."""
OUTPUT_CHUNKS = 8
"""Chunks of torchtune's loss."""
LITGPT_CHUNK_TOKENS = 128
ENTROPY_ROWS = 128
"""Rows of logits whose entropy TRL computes at once."""
IGNORED = -100


def loss_of(step: ToolStep, head: nn.Module, hidden_BTD: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    """The loss of a micro-batch, an fp32 scalar. The hidden states live until it is known, as in transformers."""
    if step.loss in LOSSES_OF_LOGITS:
        return _of_logits(step, [_head_output(step, head, hidden_BTD)], labels_BT)
    if step.loss == "fp32_logits_alone":
        return _cross_entropy(step, head(hidden_BTD).float(), labels_BT)
    if step.loss == "chunked_logits":
        return _chunked_logits(head, hidden_BTD, labels_BT, in_fp32=step.outputs_in_fp32)
    if step.loss == "chunked_head":
        return _chunked_head(step, head, hidden_BTD, labels_BT)
    return LOSSES[step.loss](head, hidden_BTD, labels_BT)


def _head_output(step: ToolStep, head: nn.Module, hidden_BTD: torch.Tensor) -> torch.Tensor:
    """The logits that the model returns."""
    logits_BTV = head(hidden_BTD)
    return logits_BTV.float() if step.head_output_in_fp32 or step.loss == "fp32_logits" else logits_BTV


def _of_logits(step: ToolStep, outputs: list[torch.Tensor], labels_BT: torch.Tensor) -> torch.Tensor:
    """A loss that needs all logits, and what else reads them. `outputs` holds the only reference to them."""
    if step.loss == "logits":
        labels = F.pad(labels_BT, (0, 1), value=IGNORED)[..., 1:].contiguous()
        values = outputs[0].float()
    else:
        labels = labels_BT[..., 1:].contiguous()
        whole = outputs[0].float() if step.loss == "shifted_logits" else outputs[0]
        values = whole[..., :-1, :].contiguous()
    loss = _cross_entropy(step, values, labels)
    del values
    if step.loss != "logits":
        del whole
    if step.outputs_in_fp32:
        outputs[0] = outputs[0].detach().float()
    if step.logits_measured:
        _measure(outputs[0].detach())
    return loss


def _cross_entropy(step: ToolStep, values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    rows = values.view(-1, values.shape[-1])
    if step.cross_entropy != "PyTorch":
        loss: torch.Tensor = _FusedCrossEntropy.apply(rows, step.cross_entropy == "in place")
        return loss
    if step.autocast:  # Of CUDA, where it computes losses in fp32.
        rows = rows.float()
    return F.cross_entropy(rows, labels.view(-1), ignore_index=IGNORED)


@torch.no_grad()
def _measure(logits_BTV: torch.Tensor) -> None:
    """Entropy and accuracy as TRL computes them."""
    measure_entropy(logits_BTV)
    logits_BTV[..., :-1, :].argmax(dim=-1)


@torch.no_grad()
def measure_entropy(logits_BTV: torch.Tensor) -> None:
    """Entropy as TRL computes it: of a copy, if there are several rows, and of some rows at once."""
    rows = logits_BTV[..., :-1, :].reshape(-1, logits_BTV.shape[-1])
    for chunk in rows.split(ENTROPY_ROWS)[:1]:
        logs = F.log_softmax(chunk, dim=-1)
        (torch.exp(logs) * logs).sum(-1)


class _FusedCrossEntropy(torch.autograd.Function):
    """One kernel for the loss, and one for the gradient of the logits, which may take their place."""

    @staticmethod
    def forward(ctx: Any, logits_MV: torch.Tensor, in_place: bool) -> torch.Tensor:
        ctx.in_place = in_place
        sums_M = logits_MV.new_empty(len(logits_MV), dtype=torch.float32)
        ctx.save_for_backward(logits_MV, sums_M)
        return sums_M.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits_MV, _ = ctx.saved_tensors
        return logits_MV if ctx.in_place else torch.empty_like(logits_MV), None


def _chunked_nll(head: nn.Module, hidden_BTD: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    hidden_MD = hidden_BTD[..., :-1, :].reshape(-1, hidden_BTD.shape[-1])
    labels_M = labels_BT[..., 1:].reshape(-1)
    order = torch.empty(len(labels_M), dtype=torch.int64)
    hidden_MD, labels_M = hidden_MD[order], labels_M[order]

    def of_chunk(hidden_CD: torch.Tensor, weight_VD: torch.Tensor, labels_C: torch.Tensor) -> torch.Tensor:
        logits_CV = hidden_CD.float() @ weight_VD.float().t()
        logs_CV = F.log_softmax(logits_CV, dim=-1)
        loss = F.nll_loss(logs_CV, labels_C, reduction="sum")
        logits_CV.argmax(dim=-1)
        (logs_CV.exp() * logs_CV).sum(dim=-1)
        return loss

    loss = hidden_MD.new_zeros((), dtype=torch.float32)
    for hidden_CD, labels_C in zip(hidden_MD.split(CHUNK_TOKENS), labels_M.split(CHUNK_TOKENS), strict=True):
        loss = loss + checkpoint(of_chunk, hidden_CD, head.weight, labels_C, use_reentrant=False)
    return loss


def _chunked_head(step: ToolStep, head: nn.Module, hidden_BTD: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    hidden_MD = hidden_BTD.reshape(-1, hidden_BTD.shape[-1])
    index = torch.empty(len(hidden_MD), dtype=torch.int64)
    hidden_MD, labels_M = hidden_MD.index_select(0, index), labels_BT.reshape(-1).index_select(0, index)
    losses = []
    for hidden_CD, labels_C in zip(*(one.tensor_split(OUTPUT_CHUNKS) for one in (hidden_MD, labels_M)), strict=True):
        output = _CompiledHead.apply(hidden_CD, head.weight) if step.compiled_head else head(hidden_CD)
        losses.append(_cross_entropy(step, output if step.cross_entropy != "PyTorch" else output.float(), labels_C))
        del output
    return torch.stack(losses).sum()


class _CompiledHead(torch.autograd.Function):
    """A head that is compiled with the loss: the gradient of its weight is no view, so later ones are added in place.

    Counted with PyTorch 2.13: autograd adds the first two gradients of a layer outside of compiled code into a third.
    """

    @staticmethod
    def forward(ctx: Any, hidden_CD: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden_CD, weight_VD)
        return hidden_CD @ weight_VD.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_CV: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_CD, weight_VD = ctx.saved_tensors
        trained = ctx.needs_input_grad[1]
        return gradient_CV @ weight_VD, gradient_CV.t() @ hidden_CD if trained else None


def _chunked_logits(
    head: nn.Module, hidden_BTD: torch.Tensor, labels_BT: torch.Tensor, *, in_fp32: bool
) -> torch.Tensor:
    logits = [head(chunk) for chunk in hidden_BTD.split(LITGPT_CHUNK_TOKENS, dim=1)]
    if in_fp32:
        logits = [chunk.float() for chunk in logits]
    labels = labels_BT.split(LITGPT_CHUNK_TOKENS, dim=1)
    losses = [
        F.cross_entropy(chunk.reshape(-1, chunk.shape[-1]), label.reshape(-1), reduction="none")
        for chunk, label in zip(logits, labels, strict=True)
    ]
    return torch.cat(losses).sum()


class _LigerHead(torch.autograd.Function):
    """Liger's fused linear cross-entropy: forward computes the gradients, a chunk of tokens at a time.

    The chunk's size is Liger's: as many tokens as make its logits about as large as the hidden states.
    """

    @staticmethod
    def forward(ctx: Any, hidden_MD: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
        M, D = hidden_MD.shape
        chunks = -(-weight_VD.shape[0] // D)
        size = 1 << (-(-M // chunks) - 1).bit_length()
        gradient_MD = torch.zeros_like(hidden_MD)
        gradient_VD = torch.zeros_like(weight_VD) if weight_VD.requires_grad else None
        losses_M = hidden_MD.new_zeros(M, dtype=torch.float32)
        for start in range(0, M, size):
            hidden_CD = hidden_MD[start : start + size]
            logits_CV = hidden_CD @ weight_VD.t()
            gradient_MD[start : start + size] = logits_CV @ weight_VD
            if gradient_VD is not None:
                gradient_VD += logits_CV.t() @ hidden_CD
            del logits_CV
        ctx.save_for_backward(gradient_MD, gradient_VD)
        return losses_M.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.saved_tensors


class _CutHead(torch.autograd.Function):
    """Cut cross-entropy (Wijmans et al. 2024, arXiv 2411.09009): logits exist in the kernels' tiles alone."""

    @staticmethod
    def forward(ctx: Any, hidden_MD: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
        sums_M = hidden_MD.new_empty(len(hidden_MD), dtype=torch.float32)
        ctx.save_for_backward(hidden_MD, weight_VD, sums_M)
        return sums_M.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_MD, weight_VD, _ = ctx.saved_tensors
        return torch.zeros_like(hidden_MD), torch.zeros_like(weight_VD) if ctx.needs_input_grad[1] else None


def _liger(head: nn.Module, hidden_BTD: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    return _LigerHead.apply(hidden_BTD.reshape(-1, hidden_BTD.shape[-1]), head.weight)


def _cut(head: nn.Module, hidden_BTD: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    return _CutHead.apply(hidden_BTD.reshape(-1, hidden_BTD.shape[-1]), head.weight)


LOSSES_OF_LOGITS = ("logits", "shifted_logits", "fp32_logits", "logits_in_16_bits")
LOSSES: dict[Loss, Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "chunked_nll": _chunked_nll,
    "liger": _liger,
    "cut_cross_entropy": _cut,
}
