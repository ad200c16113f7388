"""The loss: summed cross-entropy over the trained tokens of one micro-batch.

Shapes: B rows, T padded tokens, D hidden size, V vocabulary, N trained tokens.
"""

from typing import cast

import torch
from peft import PeftModel
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from stages.errors import UserError
from stages.step.batches import Batch

PROBE_TOKENS = 8


def causal_lm(model: nn.Module) -> PreTrainedModel:
    """The transformers model below the adapters' wrapper."""
    return cast(PreTrainedModel, model.get_base_model() if isinstance(model, PeftModel) else model)


def head_logits(model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    """Logits in fp32 of hidden states (..., D) → (..., V), with the model's soft cap where it has one (Gemma 2)."""
    logits = model.get_output_embeddings()(hidden).float()
    cap = getattr(model.config, "final_logit_softcapping", None)
    return logits if cap is None else torch.tanh(logits / cap) * cap


def decoder_hidden(lm: PreTrainedModel, input_ids_BT: torch.Tensor) -> torch.Tensor:
    """The last hidden states (B, T, D), without a mask and without a KV cache.

    Raises:
        UserError: the model does not tell its decoder from its head.
    """
    decoder = lm.get_decoder()
    if decoder is lm:
        raise UserError(f"model.name: {lm.config.model_type} has no decoder apart from its head; choose another model")
    return decoder(input_ids=input_ids_BT, use_cache=False).last_hidden_state


def summed_loss(model: nn.Module, batch: Batch, chunk: int | None) -> torch.Tensor:
    """Sum of the cross-entropy over the trained tokens of a micro-batch, an fp32 scalar.

    The decoder runs without a mask (rows are right-padded, attention is causal) and without a KV cache. With `chunk`
    set, only trained positions reach the head, `chunk` of them at a time, and their logits are recomputed in backward:
    at most chunk × V logits exist. Without it the logits of all B × T positions exist at once.
    """
    lm = causal_lm(model)
    hidden_BTD = decoder_hidden(lm, batch.input_ids_BT)
    if chunk is None:
        logits_MV = head_logits(lm, hidden_BTD).flatten(0, 1)
        return F.cross_entropy(logits_MV, batch.targets_BT.flatten(), reduction="sum", ignore_index=-100)
    hidden_ND, targets_N = _trained_positions(hidden_BTD, batch)
    total = hidden_ND.new_zeros((), dtype=torch.float32)
    for hidden, targets in zip(hidden_ND.split(chunk), targets_N.split(chunk), strict=True):
        total = total + checkpoint(_chunk_loss, lm, hidden, targets, use_reentrant=False, preserve_rng_state=False)
    return total


@torch.no_grad()
def token_losses(model: nn.Module, batch: Batch, chunk: int) -> torch.Tensor:
    """Cross-entropy of each trained token of a batch, fp32 of shape (N,), in the order of `supervised_index_N`.

    For evaluation: the same decoder pass and head as `summed_loss`, at most `chunk` × V logits at a time.
    """
    lm = causal_lm(model)
    hidden_BTD = decoder_hidden(lm, batch.input_ids_BT)
    hidden_ND, targets_N = _trained_positions(hidden_BTD, batch)
    chunks = zip(hidden_ND.split(chunk), targets_N.split(chunk), strict=True)
    losses = [F.cross_entropy(head_logits(lm, hidden), targets, reduction="none") for hidden, targets in chunks]
    return torch.cat(losses)


def _trained_positions(hidden_BTD: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states (N, D) of the positions whose next token is trained, and those tokens (N,)."""
    hidden_ND = hidden_BTD.flatten(0, 1).index_select(0, batch.supervised_index_N)
    targets_N = batch.targets_BT.flatten().index_select(0, batch.supervised_index_N)
    return hidden_ND, targets_N


def _chunk_loss(model: PreTrainedModel, hidden_CD: torch.Tensor, targets_C: torch.Tensor) -> torch.Tensor:
    """Summed cross-entropy of C trained positions."""
    return F.cross_entropy(head_logits(model, hidden_CD), targets_C, reduction="sum")


@torch.no_grad()
def check_head(model: nn.Module, device: torch.device) -> None:
    """Try a model on a few tokens: is its loss the one computed here, and does it never look ahead?

    Raises:
        UserError: it does more to its logits than `head_logits` knows, or later tokens change earlier logits, so that
            padding on the right would be seen.
    """
    lm = causal_lm(model)
    training = lm.training
    lm.eval()
    input_ids = torch.arange(PROBE_TOKENS, device=device)[None] % lm.config.get_text_config().vocab_size
    own = lm(input_ids=input_ids, use_cache=False).logits.float()
    ours = head_logits(lm, decoder_hidden(lm, input_ids))
    input_ids[0, -1] = 0
    changed = head_logits(lm, decoder_hidden(lm, input_ids))
    lm.train(training)
    if not _close(ours[:, :-1], changed[:, :-1]):
        raise UserError(f"model.name: must be causal; {lm.config.model_type} lets a token see later ones")
    if not _close(own, ours):
        raise UserError(
            f"model.name: {lm.config.model_type} changes its logits after the head (largest difference "
            f"{(own - ours).abs().max().item():.3g}), which is not supported yet; choose another model"
        )


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether logits agree to what bf16 arithmetic in another order can change, 2% of their largest size."""
    return bool((a - b).abs().max() <= 0.02 * a.abs().max())
