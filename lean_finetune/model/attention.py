"""The attention of every training step: causal, unmasked, by PyTorch's scaled-dot-product kernels where they can.

Rows are padded on the right, so a causal model never lets a real token see padding and no mask is needed. Without a
mask the flash kernel stays usable and no (batch, 1, length, length) tensor exists. Rows that are joined into one
sequence attend each to itself alone, again without a mask. The same functions run on real and on fake tensors; only
the kernel at the bottom can be replaced, so that a trace on the CPU can ask for what a GPU runs.

Shape legend: B rows (1 where they are joined), H query heads, T tokens, D head size, R joined rows.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from lean_finetune.config.field_types import AttentionName

ATTENTION = "lean_sdpa"
CAPPED_ATTENTION = "lean_capped"
"""The same function, under a name that transformers does not refuse to models with capped scores."""
EAGER_ATTENTION = "lean_eager"
"""All length × length scores, by products of PyTorch's own."""
FLASH_ATTENTION = "lean_fa2"
"""As lean_sdpa, and PyTorch may choose no kernel but FlashAttention-2."""
FLASH_CAPABILITY = (8, 0)
FLASH_MAX_HEAD_SIZE = 256
FLASH_HEAD_SIZE_MULTIPLE = 8
CAUSAL_WINDOW = (-1, 0)
"""varlen_attn's way to say: everything before a token, nothing after it."""
# Added to varlen_attn one by one; without them rows are attended to one after the other.
VARLEN_READY = {"scale", "window_size", "enable_gqa"} <= set(inspect.signature(varlen_attn).parameters)

Kernel = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
_kernel: Kernel = sdpa_attention_forward
_traced_capability: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class JoinedRows:
    """Where the rows of one sequence (1, T) lie. Padding at its end counts as rows of its own."""

    lengths: tuple[int, ...]
    """Tokens of each row, in order; they sum to T."""
    offsets: torch.Tensor
    """int32 of shape (R + 1,): the first token of each row, and T."""
    positions_BT: torch.Tensor
    """int64 of shape (1, T): each token's place in its own row."""

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "JoinedRows":
        """The same rows with tensors on another device."""
        return JoinedRows(
            lengths=self.lengths,
            offsets=self.offsets.to(device, non_blocking=non_blocking),
            positions_BT=self.positions_BT.to(device, non_blocking=non_blocking),
        )


def takes_flash(query: torch.Tensor, capability: tuple[int, int]) -> bool:
    """Whether CUDA's flash kernel takes this query (B, H, T, D): 16-bit, Ampere or later, no huge heads."""
    half = query.dtype in (torch.bfloat16, torch.float16)
    return half and capability >= FLASH_CAPABILITY and query.shape[-1] <= FLASH_MAX_HEAD_SIZE


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    joined_rows: JoinedRows | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of one layer; shapes as in transformers' attention interface."""
    if softcap is not None:
        assert joined_rows is None  # refuse_joined_rows saw to it.
        return _by_scores(module, query, key, value, attention_mask, softcap=softcap, **kwargs), None
    capability = _capability(query)
    flash = capability is not None and takes_flash(query, capability)
    if joined_rows is not None and flash and VARLEN_READY and not kwargs.get("dropout"):
        return _all_rows_at_once(query, key, value, joined_rows, kwargs.get("scaling")), None
    if capability is not None and not flash:
        # Not every PyTorch's memory-efficient kernel groups heads: it would fall back to all length × length scores.
        groups = query.shape[1] // key.shape[1]
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    if joined_rows is None:
        return _kernel(module, query, key, value, attention_mask, **kwargs)
    rows = zip(*(tensor.split(joined_rows.lengths, dim=2) for tensor in (query, key, value)), strict=True)
    return torch.cat([_kernel(module, *row, None, **kwargs)[0] for row in rows], dim=1), None


def _eager_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    joined_rows: JoinedRows | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer by its scores; joined rows one after the other."""
    if joined_rows is None:
        return _by_scores(module, query, key, value, attention_mask, **kwargs), None
    rows = zip(*(tensor.split(joined_rows.lengths, dim=2) for tensor in (query, key, value)), strict=True)
    return torch.cat([_by_scores(module, q, k, v, None, **kwargs) for q, k, v in rows], dim=1), None


def _flash_attention(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of one layer by FlashAttention-2 or not at all."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return _attention(*args, **kwargs)


def _by_scores(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Attention, its scores bent to ±softcap where one is given (Gemma 2): no fused kernel does that.

    (B, H, T, D) → (B, T, H, D). All length × length scores exist, and backward keeps them. `attention_mask` is bool,
    True where a token may look.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores_BHTT = torch.matmul(query * (scale / (softcap or 1.0)), key.transpose(2, 3))
    if softcap is not None:
        scores_BHTT = torch.tanh(scores_BHTT) * softcap
    if attention_mask is None:
        attention_mask = torch.ones(scores_BHTT.shape[-2:], dtype=torch.bool, device=query.device).tril()
    # Not -inf: padding on the left may look at nothing, and must not become NaN.
    scores_BHTT = scores_BHTT.masked_fill(attention_mask.logical_not(), torch.finfo(scores_BHTT.dtype).min)
    weights_BHTT = F.softmax(scores_BHTT, dim=-1, dtype=torch.float32).to(query.dtype)
    weights_BHTT = F.dropout(weights_BHTT, p=dropout, training=module.training)
    return torch.matmul(weights_BHTT, value).transpose(1, 2).contiguous()


def caps_scores(config: PretrainedConfig) -> bool:
    """Whether a model's attention bends its scores, so that all of them exist."""
    return getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None


def materializes_scores(config: PretrainedConfig, asked: AttentionName) -> bool:
    """Whether all length × length scores exist in training."""
    return asked == "eager" or caps_scores(config)


def training_attention(config: PretrainedConfig, asked: AttentionName = "auto") -> str:
    """The attention of every training step of a model; `asked` is train.attention."""
    if caps_scores(config):
        return CAPPED_ATTENTION
    return {"eager": EAGER_ATTENTION, "flash_attention_2": FLASH_ATTENTION}.get(asked, ATTENTION)


def generation_attention(config: PretrainedConfig) -> str:
    """The attention of a model that answers prompts, padded on the left and so with a mask.

    transformers' own, but where scores are capped, which that one leaves out.
    """
    return CAPPED_ATTENTION if caps_scores(config) else "sdpa"


def _capability(query: torch.Tensor) -> tuple[int, int] | None:
    """Compute capability of the GPU that a query is on, or is traced for; None on a CPU."""
    if query.device.type == "cuda":
        return torch.cuda.get_device_capability(query.device)
    return _traced_capability


def _all_rows_at_once(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, joined_rows: JoinedRows, scale: float | None
) -> torch.Tensor:
    """Causal attention of each row to itself by one flash kernel, (1, H, T, D) → (1, T, H, D)."""
    D, longest = query.shape[-1], max(joined_rows.lengths)
    # The kernel wants whole vectors; the scale must stay that of the true head size.
    padding = -D % FLASH_HEAD_SIZE_MULTIPLE
    query_THD, key_THD, value_THD = (
        (F.pad(tensor, (0, padding)) if padding else tensor).transpose(1, 2)[0] for tensor in (query, key, value)
    )
    out_THD = varlen_attn(
        query_THD,
        key_THD,
        value_THD,
        joined_rows.offsets,
        joined_rows.offsets,
        longest,
        longest,
        scale=D**-0.5 if scale is None else scale,
        window_size=CAUSAL_WINDOW,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out_THD[None, :, :, :D]  # type: ignore[call-overload]


def _mask(*, kv_length: int, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor | None:
    """None for plain causal attention, else transformers' mask.

    transformers cannot see that position ids are unpacked when tensors are fake and would then build a mask that real
    training never has; deciding from the arguments alone keeps both alike. A mask that some model makes itself where it
    was given none (BioGPT) is of ones alone, and transformers would look at its values to leave it out.
    """
    window = kwargs.get("local_size")
    if _none_was_given:
        attention_mask = None
    if attention_mask is None and (_rows_are_joined or window is None or kv_length < window):
        return None
    return sdpa_mask(kv_length=kv_length, attention_mask=attention_mask, **kwargs)


_none_was_given = _rows_are_joined = False


@contextmanager
def joined_forward(joined_rows: JoinedRows | None) -> Iterator[dict[str, Any]]:
    """Arguments of a decoder's forward inside the block, which is given no mask; for rows that are joined, how.

    The rows travel as an argument, which recomputation in backward sees again. Masks are made once, at the start of
    the forward pass, where no argument of ours arrives: of joined rows none are.
    """
    global _none_was_given, _rows_are_joined
    _none_was_given, _rows_are_joined = True, joined_rows is not None
    try:
        yield {} if joined_rows is None else {"position_ids": joined_rows.positions_BT, "joined_rows": joined_rows}
    finally:
        _none_was_given = _rows_are_joined = False


@contextmanager
def attention_kernel(kernel: Kernel, capability: tuple[int, int]) -> Iterator[None]:
    """Run attention inside the block as a GPU of this compute capability would; used by estimate."""
    global _kernel, _traced_capability
    before = _kernel, _traced_capability
    _kernel, _traced_capability = kernel, capability
    try:
        yield
    finally:
        _kernel, _traced_capability = before


for name, function in {
    ATTENTION: _attention,
    CAPPED_ATTENTION: _attention,
    EAGER_ATTENTION: _eager_attention,
    FLASH_ATTENTION: _flash_attention,
}.items():
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, _mask)
