"""The decoder pass of one micro-batch, and the loss of its output.

Shapes: B rows, T padded tokens, D hidden size, V vocabulary, N trained tokens.
"""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, cast

import torch
from peft import PeftModel
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from lean_finetune.core.errors import UserError
from lean_finetune.model.attention.kernels import PackedRows, TokenExchange, maskless_forward, rows_reached_attention
from lean_finetune.model.empty_model import left_out
from lean_finetune.model.experts.experts_forward import balancing_loss
from lean_finetune.model.model_config import (
    UNPACKED,
    has_attention,
    rows_see_each_other,
    tokens_seen_outside_attention,
)
from lean_finetune.rows.batch_part import BatchPart
from lean_finetune.step.batches import IGNORED, Batch, pack_rows
from lean_finetune.step.head_loss import Head, TokenRule, summed_head_loss, used_layer
from lean_finetune.step.offload.activation_offload import KEPT, KeptActivations
from lean_finetune.step.parallel_model import OtherStage

PROBE_TOKENS = 8
OTHER_ORDER = 0.02
"""Largest relative difference between logits that bf16 computes in another order."""
UNSEEN = 1e-4
"""The same in fp32, or in any type if shapes are equal and only tokens differ that must not be visible."""


def causal_lm(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside peft's wrapper."""
    return cast(PreTrainedModel, model.get_base_model() if isinstance(model, PeftModel) else model)


def head_logits(model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    """Logits in fp32 of hidden states (..., D) → (..., V), with the model's factor (Granite) and soft cap (Gemma 2)."""
    return Head.of(model).logits(hidden)


def decoder_hidden(
    lm: PreTrainedModel,
    input_ids_BT: torch.Tensor,
    packed_rows: PackedRows | None = None,
    positions_BT: torch.Tensor | None = None,
    exchange: TokenExchange | None = None,
    parts: Sequence[BatchPart] = (),
) -> torch.Tensor:
    """The last hidden states (B, T, D), computed without a mask and without a KV cache.

    With an `exchange`, for this process's part of the rows' tokens, which are at `positions_BT`.
    """
    return _decoder_output(lm, input_ids_BT, packed_rows, positions_BT, exchange, parts).last_hidden_state


def _decoder_output(
    lm: PreTrainedModel,
    input_ids_BT: torch.Tensor,
    packed_rows: PackedRows | None,
    positions_BT: torch.Tensor | None,
    exchange: TokenExchange | None,
    parts: Sequence[BatchPart],
    **more: bool,
) -> Any:
    """The decoder's output, computed without a mask and without a KV cache; `more` are arguments for it.

    `parts` are what the rows carry besides tokens. Where these are arguments of the model, of the complete model
    without its head.

    Raises:
        UserError: the family's code takes no positions, or does not pass the packed rows, or the exchange of divided
            ones, on to its attention.
    """
    shown = {name: value for part in parts for name, value in part.arguments.items()}
    decoder = lm.base_model if shown else lm.get_decoder()
    name = lm.config.model_type
    takes_positions = "position_ids" in inspect.signature(decoder.forward).parameters
    if exchange is not None and not takes_positions:
        raise tokens_seen_outside_attention(name)
    if packed_rows is not None and not takes_positions and has_attention(lm.config):
        raise UserError(f"bucket.mode: packed needs a model that takes position_ids; {name} does not; {UNPACKED}")
    inputs: dict[str, torch.Tensor] = {"input_ids": input_ids_BT}
    for part in parts:
        inputs = part.inputs(lm, inputs)
    masked = any(part.masks for part in parts)
    with maskless_forward(packed_rows, positions_BT, exchange, keeps_masks=masked) as arguments:
        output = decoder(**inputs, use_cache=False, **{**shown, **arguments}, **more)
    if not rows_reached_attention():
        raise rows_see_each_other(name) if exchange is None else tokens_seen_outside_attention(name)
    return output


class HiddenLoss(Protocol):
    """The loss of a micro-batch from the decoder's output; `step_loss` has those of objectives."""

    divisor: float
    """Trained tokens of the optimizer step, divided by the loss scale."""

    def loss(self, lm: PreTrainedModel, hidden_BTD: torch.Tensor, batch: Batch) -> torch.Tensor:
        """An fp32 scalar."""


def summed_loss(
    model: nn.Module,
    batch: Batch,
    objective: HiddenLoss,
    offload: KeptActivations = KEPT,
    router_aux_loss: float = 0.0,
    exchange: TokenExchange | None = None,
) -> torch.Tensor:
    """The part of an objective's loss that a micro-batch has, an fp32 scalar.

    In a pipeline's stage before the last the value is a placeholder: its backward propagates the gradients that the
    next stage sends.

    Args (those that their types do not explain):
        offload: takes what the decoder saves for backward.
        router_aux_loss: times the balancing loss of a mixture of experts is added for each trained token.
        exchange: for a batch with a part of each row's tokens; the sum is over these tokens.
    """
    lm = causal_lm(model)
    more = {"output_router_logits": True} if router_aux_loss else {}
    with offload.saving(lm):
        output = _decoder_output(
            lm, batch.input_ids_BT, batch.packed_rows, batch.positions_BT, exchange, batch.parts, **more
        )
    router_logits, hidden_BTD = getattr(output, "router_logits", None), output.last_hidden_state
    del output
    if isinstance(lm.get_output_embeddings(), OtherStage):  # Before the last stage of a pipeline.
        # A scalar to call backward on: the hidden states are placeholders, whose backward receives the real gradient.
        return hidden_BTD.sum().float()
    loss = objective.loss(lm, hidden_BTD, batch)
    if router_aux_loss:
        # Per trained token, as the cross-entropy is, so that micro-batches count by their tokens.
        weight = router_aux_loss * len(batch.supervised_index_N) / objective.divisor
        loss = weight * balancing_loss(lm, router_logits) + loss
    return loss


def head_scores(lm: PreTrainedModel, hidden_RD: torch.Tensor) -> torch.Tensor:
    """The output of a reward model's head, fp32 (R,)."""
    head: Any = used_layer(lm.get_output_embeddings())
    with torch.autocast(hidden_RD.device.type, enabled=False):  # In the type of the head: it is small.
        scores: torch.Tensor = head(hidden_RD.to(head.weight.dtype)).float().squeeze(1)
    return scores


def cross_entropy(
    lm: PreTrainedModel,
    hidden_BTD: torch.Tensor,
    batch: Batch,
    chunk: int | None,
    divisor: float,
    rule: TokenRule | None = None,
) -> torch.Tensor:
    """Summed cross-entropy of the trained tokens of a micro-batch / divisor, or what a rule makes of them.

    `chunk` and `divisor` as of `TokenLoss`.
    """
    if chunk is not None:
        return summed_head_loss(
            Head.of(lm),
            hidden_BTD.flatten(0, 1),
            batch.supervised_index_N,
            _trained_tokens(batch),
            chunk,
            divisor,
            rule,
        )
    logits_MV = head_logits(lm, hidden_BTD).flatten(0, 1)
    targets_M = batch.targets_BT.flatten()
    if rule is None:
        return F.cross_entropy(logits_MV, targets_M, reduction="sum", ignore_index=IGNORED) / divisor
    losses_M = F.cross_entropy(logits_MV, targets_M, reduction="none", ignore_index=IGNORED)
    losses_N = losses_M.index_select(0, batch.supervised_index_N)
    value, weights_N = rule(losses_N.detach())
    weighted = losses_N @ weights_N  # Has the derivatives of the value.
    return weighted - weighted.detach() + value


@torch.no_grad()
def token_losses(model: nn.Module, batch: Batch, chunk: int) -> torch.Tensor:
    """Cross-entropy of each trained token of a batch, fp32 of shape (N,), in the order of `supervised_index_N`.

    For evaluation: the same decoder pass and head as `summed_loss`, at most `chunk` × V logits at a time.
    """
    lm = causal_lm(model)
    hidden_MD = decoder_hidden(lm, batch.input_ids_BT, batch.packed_rows, parts=batch.parts).flatten(0, 1)
    return Head.of(lm).losses(hidden_MD, batch.supervised_index_N, _trained_tokens(batch), chunk)


@torch.no_grad()
def negative_scores(model: nn.Module, batch: Batch, chunk: int) -> torch.Tensor:
    """Less a reward model's score at the last trained token of each row, 0 at the others; fp32 (N,).

    For evaluation, in the place of the cross-entropy: both sum to less for a better answer. `chunk` has no effect.
    """
    lm = causal_lm(model)
    index_N, T = batch.supervised_index_N, batch.input_ids_BT.shape[1]
    row_N = index_N // T
    is_last_N = torch.cat([row_N[1:] != row_N[:-1], row_N.new_ones(1, dtype=torch.bool)])
    hidden_MD = decoder_hidden(lm, batch.input_ids_BT, batch.packed_rows, parts=batch.parts).flatten(0, 1)
    figures_N = torch.zeros(len(index_N), device=hidden_MD.device)
    figures_N[is_last_N] = -head_scores(lm, hidden_MD[index_N[is_last_N] + 1])
    return figures_N


def trained_logits(model: nn.Module, batch: Batch, chunk: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield logits (C, V) and targets (C,) of at most `chunk` trained tokens, in the order of `supervised_index_N`."""
    lm = causal_lm(model)
    hidden_MD = decoder_hidden(lm, batch.input_ids_BT, batch.packed_rows, parts=batch.parts).flatten(0, 1)
    hidden_ND = hidden_MD.index_select(0, batch.supervised_index_N)
    for hidden, targets in zip(hidden_ND.split(chunk), _trained_tokens(batch).split(chunk), strict=True):
        yield head_logits(lm, hidden), targets


def _trained_tokens(batch: Batch) -> torch.Tensor:
    """The trained tokens (N,), in the order of `supervised_index_N`."""
    return batch.targets_BT.flatten().index_select(0, batch.supervised_index_N)


@torch.no_grad()
def check_head(model: nn.Module, device: torch.device) -> None:
    """Raise UserError if `head_logits` differs from the model's own logits, or a token sees later ones (few tokens)."""
    lm = causal_lm(model)
    training = lm.training
    lm.eval()
    input_ids = torch.arange(PROBE_TOKENS, device=device)[None] % lm.config.get_text_config().vocab_size
    try:
        own = lm(input_ids=input_ids, use_cache=False).logits.float()
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # A family's code may need more than text.
        if not left_out(lm):
            raise
        raise UserError(
            f"model.name: {lm.config.model_type} cannot be trained on text alone ({type(error).__name__}: "
            f"{next(iter(str(error).strip().splitlines()), '')}); choose another model"
        ) from None
    ours = head_logits(lm, decoder_hidden(lm, input_ids))
    # The last token alone differs, so logits of the positions before it must not.
    input_ids[0, -1] = 0
    changed = head_logits(lm, decoder_hidden(lm, input_ids))
    lm.train(training)
    if not _close(ours[:, :-1], changed[:, :-1]):
        raise UserError(f"model.name: must be causal; {lm.config.model_type} lets a token see later ones")
    if own.dim() == 2:  # A reward model returns the score of the last token that is not the padding token.
        pads = lm.config.get_text_config().pad_token_id == PROBE_TOKENS - 1
        own, ours = own[:, None], ours[:, -2:-1] if pads else ours[:, -1:]
    if not _close(own, ours):
        raise UserError(
            f"model.name: {lm.config.model_type} changes its logits after the head in a way that the loss does not; "
            "choose another model"
        )


@torch.no_grad()
def check_packed_rows(model: nn.Module, device: torch.device) -> None:
    """Raise UserError if one of two packed rows sees the other, or has positions that do not begin at 0."""
    lm = causal_lm(model)
    training = lm.training
    lm.eval()
    vocabulary = lm.config.get_text_config().vocab_size
    row = torch.arange(PROBE_TOKENS, device=device)[None] % vocabulary
    joined = pack_rows((PROBE_TOKENS, PROBE_TOKENS), 2 * PROBE_TOKENS).to(device)
    behind, behind_another = (
        head_logits(lm, decoder_hidden(lm, torch.cat([first, row], dim=1), joined)[:, PROBE_TOKENS:])
        for first in (row, row.flip(1))
    )
    alone = head_logits(lm, decoder_hidden(lm, row))
    lm.train(training)
    exact = UNSEEN if lm.dtype == torch.float32 else OTHER_ORDER
    if not _close(behind, alone, exact) or not _close(behind, behind_another, UNSEEN):
        raise rows_see_each_other(lm.config.model_type)


@torch.no_grad()
def check_context_parallel(model: nn.Module, exchange: TokenExchange, device: torch.device) -> None:
    """Raise UserError if a part of a row's tokens gets other logits than the same tokens of the complete row."""
    lm = causal_lm(model)
    training = lm.training
    lm.eval()
    tokens = PROBE_TOKENS * exchange.parts
    row = torch.arange(tokens, device=device)[None] % lm.config.get_text_config().vocab_size
    positions = torch.arange(tokens, device=device)[None]
    own = slice(PROBE_TOKENS * exchange.index, PROBE_TOKENS * (exchange.index + 1))
    complete = head_logits(lm, decoder_hidden(lm, row)[:, own])
    part = head_logits(lm, decoder_hidden(lm, row[:, own], None, positions[:, own], exchange))
    lm.train(training)
    if not _close(complete, part, UNSEEN if lm.dtype == torch.float32 else OTHER_ORDER):
        raise tokens_seen_outside_attention(lm.config.model_type)


def _close(a: torch.Tensor, b: torch.Tensor, share: float = OTHER_ORDER) -> bool:
    """Whether logits have the same shape, and differ by at most this share of the largest."""
    return a.shape == b.shape and bool((a - b).abs().max() <= share * a.abs().max())
