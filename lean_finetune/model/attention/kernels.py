"""Attention as transformers calls it: kernels by device, packed and context-parallel rows, windows, caps."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from lean_finetune.core.errors import UserError
from lean_finetune.model.attention.sinks import sink_attention
from lean_finetune.patches.of_models import PACKED_SEARCH

# Packed rows and context parallelism in the forward pass of a decoder, and how they reach its attention.
#
# Shape legend: B rows (1 where they are packed), H query heads, T tokens, D head size, R packed rows.


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedRows:
    """The rows of a packed sequence (1, T). Padding at its end counts as further rows."""

    lengths: tuple[int, ...]
    """Tokens of each row, in order; they sum to T."""
    offsets: torch.Tensor
    """int32 of shape (R + 1,): the first token of each row, and T."""
    positions_BT: torch.Tensor
    """int64 of shape (1, T): each token's position in its row."""
    _chunks: dict[int, torch.Tensor] = field(default_factory=dict, init=False, repr=False)

    def chunks_of(self, size: int) -> torch.Tensor:
        """int32 of shape (chunks, 2): the row of each chunk of `size` tokens, and its number there; kept."""
        if size not in self._chunks:
            places = [(row, part) for row, length in enumerate(self.lengths) for part in range(-(-length // size))]
            on_host = torch.tensor(places, dtype=torch.int32, pin_memory=self.offsets.is_cuda)
            self._chunks[size] = on_host.to(self.offsets.device, non_blocking=True)
        return self._chunks[size]

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "PackedRows":
        """The same rows with tensors on another device."""
        return PackedRows(
            lengths=self.lengths,
            offsets=self.offsets.to(device, non_blocking=non_blocking),
            positions_BT=self.positions_BT.to(device, non_blocking=non_blocking),
        )


class TokenExchange(ABC):
    """Exchanges tokens for heads among the processes that each have a part of every row's tokens."""

    def __init__(self, *, parts: int, index: int):
        """`parts` is the number of processes, `index` (from 0) this process and the part of each row that it has."""
        self.parts, self.index = parts, index

    @abstractmethod
    def to_heads(self, heads_BHtD: torch.Tensor) -> torch.Tensor:
        """All heads of this process's tokens → this process's heads of all tokens, (B, H / parts, T, D)."""

    @abstractmethod
    def to_tokens(self, out_BTHD: torch.Tensor) -> torch.Tensor:
        """This process's heads of all tokens → all heads of this process's tokens, (B, T / parts, H, D)."""


def key_copies(heads: int, key_heads: int, parts: int) -> int:
    """The fewest copies of each key/value head that split evenly into `parts`, which divides the query heads."""
    groups = heads // key_heads
    return next(n for n in range(1, groups + 1) if groups % n == 0 and key_heads * n % parts == 0)


@dataclass
class CurrentForward:
    """State of the running forward pass, for functions that transformers calls without our arguments."""

    rows_are_packed: bool = False
    parts: int = 1
    """Processes that share the tokens of each row (context parallelism)."""
    keeps_masks: bool = False
    """Whether the model's own masks are made: some tokens see later ones."""
    got_rows: list[bool] = field(default_factory=list)
    """For each call of attention with packed rows or context parallelism: whether it received them. For packed rows
    also each call of another function that mixes tokens."""


current = CurrentForward()


def rows_reached_attention() -> bool:
    """Whether every call of attention in the last forward got the packed rows, or the context-parallel exchange."""
    return all(current.got_rows)


def note_rows(packed_rows: PackedRows | None) -> None:
    """Note for `rows_reached_attention` what a function that mixes tokens got, if rows are packed."""
    if current.rows_are_packed:
        current.got_rows.append(packed_rows is not None)


@contextmanager
def maskless_forward(
    packed_rows: PackedRows | None,
    positions_BT: torch.Tensor | None = None,
    exchange: TokenExchange | None = None,
    *,
    keeps_masks: bool = False,
) -> Iterator[dict[str, Any]]:
    """A context for a decoder's forward without a mask; yields its arguments for packed or context-parallel rows.

    With `keeps_masks`, a model makes the masks that are more than causal.

    With an `exchange`, `positions_BT` belong to this process's tokens. Rows and exchange are arguments, so that
    recomputation in backward gets them again. Masks are made at the start of the forward, which gets no argument of
    ours, so global flags decide them.
    """
    current.rows_are_packed = packed_rows is not None
    current.parts = 1 if exchange is None else exchange.parts
    current.keeps_masks = keeps_masks
    current.got_rows.clear()
    try:
        rows = {} if packed_rows is None else {"position_ids": packed_rows.positions_BT, "packed_rows": packed_rows}
        with PACKED_SEARCH.during(no_packed_rows):
            yield rows if exchange is None else {**rows, "position_ids": positions_BT, "exchange": exchange}
    finally:
        current.rows_are_packed, current.parts, current.keeps_masks = False, 1, False


def no_packed_rows(position_ids: torch.Tensor) -> None:
    """Replaces transformers' search for packed rows; finds none."""


# Kernels of attention: flash for packed rows, plain operations for all scores, and what a device supports.
#
# Shape legend: B rows (1 where they are packed), H query heads, T tokens, D head size.

FLASH_CAPABILITY = (8, 0)
FLASH_MAX_HEAD_SIZE = 256
FLASH_HEAD_SIZE_MULTIPLE = 8
CAUSAL_WINDOW = (-1, 0)
"""Argument of varlen_attn for causal attention."""
# Versions of torch without all of these arguments compute packed rows one after the other.
VARLEN_READY = {"scale", "window_size", "enable_gqa"} <= set(inspect.signature(varlen_attn).parameters)

Kernel = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
_kernel: Kernel = sdpa_attention_forward
_traced_capability: tuple[int, int] | None = None


def takes_flash(query: torch.Tensor, capability: tuple[int, int]) -> bool:
    """Whether the CUDA flash kernel supports this query (B, H, T, D): 16-bit, Ampere or later, head size."""
    half = query.dtype in (torch.bfloat16, torch.float16)
    return half and capability >= FLASH_CAPABILITY and query.shape[-1] <= FLASH_MAX_HEAD_SIZE


def gpu_capability(query: torch.Tensor) -> tuple[int, int] | None:
    """Compute capability of the GPU that a query is on or traced for; None on a CPU."""
    if query.device.type == "cuda":
        return torch.cuda.get_device_capability(query.device)
    return _traced_capability


@contextmanager
def attention_kernel(kernel: Kernel, capability: tuple[int, int]) -> Iterator[None]:
    """A context in which attention runs as on a GPU of this compute capability; used by estimate."""
    global _kernel, _traced_capability
    before = _kernel, _traced_capability
    _kernel, _traced_capability = kernel, capability
    try:
        yield
    finally:
        _kernel, _traced_capability = before


def fused_attention(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of one layer by transformers' sdpa, or by the kernel that `attention_kernel` sets."""
    return _kernel(*args, **kwargs)


def attention_by_scores(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Attention with explicit scores, capped to ±softcap if given (Gemma 2), which no fused kernel supports.

    (B, H, T, D) → (B, T, H, D). All length × length scores exist and are saved for backward. `attention_mask` is bool,
    True where a token may attend.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores_BHTT = torch.matmul(query * (scale / (softcap or 1.0)), key.transpose(2, 3))
    if softcap is not None:
        scores_BHTT = torch.tanh(scores_BHTT) * softcap
    if attention_mask is None:
        earlier = key.shape[2] - query.shape[2]  # Cached tokens, in generation.
        attention_mask = torch.ones(scores_BHTT.shape[-2:], dtype=torch.bool, device=query.device).tril(earlier)
    # Not -inf: a padding token on the left attends to nothing, which must not give NaN.
    scores_BHTT = scores_BHTT.masked_fill(attention_mask.logical_not(), torch.finfo(scores_BHTT.dtype).min)
    if s_aux is not None:
        sinks_BHT1 = s_aux.to(scores_BHTT.dtype)[None, :, None, None].expand(*scores_BHTT.shape[:3], 1)
        scores_BHTT = torch.cat([scores_BHTT, sinks_BHT1], dim=-1)
    weights_BHTT = F.softmax(scores_BHTT, dim=-1, dtype=torch.float32).to(query.dtype)
    if s_aux is not None:
        weights_BHTT = weights_BHTT[..., :-1]
    weights_BHTT = F.dropout(weights_BHTT, p=dropout, training=module.training)
    return torch.matmul(weights_BHTT, value).transpose(1, 2).contiguous()


def varlen_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed_rows: PackedRows, scale: float | None
) -> torch.Tensor:
    """Causal attention of each row to itself by one flash kernel, (1, H, T, D) → (1, T, H, D)."""
    D, longest = query.shape[-1], max(packed_rows.lengths)
    # The kernel needs head sizes that are multiples of 8; the scale is still computed from the true head size.
    padding = -D % FLASH_HEAD_SIZE_MULTIPLE
    query_THD, key_THD, value_THD = (
        (F.pad(tensor, (0, padding)) if padding else tensor).transpose(1, 2)[0] for tensor in (query, key, value)
    )
    out_THD = varlen_attn(
        query_THD,
        key_THD,
        value_THD,
        packed_rows.offsets,
        packed_rows.offsets,
        longest,
        longest,
        scale=D**-0.5 if scale is None else scale,
        window_size=CAUSAL_WINDOW,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out_THD[None, :, :, :D]  # type: ignore[call-overload]


# Attention of the training step: causal, without a mask, with PyTorch's scaled-dot-product kernels.
#
# Rows are padded on the right and attention is causal, so no real token sees padding and no mask is needed. Without a
# mask the flash kernel is usable and no (batch, 1, length, length) tensor exists. Packed rows attend to themselves
# alone, also without a mask. The same functions run on real and on fake tensors; estimate replaces the kernel, so that
# a trace on the CPU uses the kernels of a GPU.
#
# Shape legend: B rows (1 where they are packed), H query heads, T tokens, D head size.

ATTENTION = "lean_sdpa"
CAPPED_ATTENTION = "lean_capped"
"""The same function as lean_sdpa. transformers refuses names with `sdpa` for models that sdpa cannot compute."""
EAGER_ATTENTION = "lean_eager"
"""Computes all length × length scores with plain matmuls."""
FLASH_ATTENTION = "lean_fa2"
"""As lean_sdpa, but restricted to FlashAttention-2."""


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed_rows: PackedRows | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of one layer; shapes as in transformers' attention interface, which calls the sinks `s_aux`."""
    note_rows(packed_rows)
    if softcap is not None:
        assert packed_rows is None  # `refuse_packed_rows` refuses such models.
        return attention_by_scores(module, query, key, value, attention_mask, softcap=softcap, **kwargs), None
    if (padding := query.shape[-1] - value.shape[-1]) > 0:
        # Fused kernels need values of the query's size (DeepSeek's are shorter); without them all scores would exist.
        padded = F.pad(value, (0, padding))
        out, _ = _attention(module, query, key, padded, attention_mask, packed_rows=packed_rows, s_aux=s_aux, **kwargs)
        return out[..., :-padding], None
    if s_aux is not None:
        return _with_sinks(module, query, key, value, attention_mask, packed_rows, s_aux, kwargs), None
    capability = gpu_capability(query)
    flash = capability is not None and takes_flash(query, capability)
    if packed_rows is not None and flash and VARLEN_READY and not kwargs.get("dropout"):
        return varlen_attention(query, key, value, packed_rows, kwargs.get("scaling")), None
    if capability is not None and not flash:
        # In some versions the memory-efficient kernel cannot group heads and would fall back to computing all scores.
        groups = query.shape[1] // key.shape[1]
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
        module = _LocalHeads(module, 1)  # With a mask transformers would repeat them again.
    if packed_rows is None:
        return fused_attention(module, query, key, value, attention_mask, **kwargs)
    rows = zip(*(tensor.split(packed_rows.lengths, dim=2) for tensor in (query, key, value)), strict=True)
    return torch.cat([fused_attention(module, *row, None, **kwargs)[0] for row in rows], dim=1), None


def _with_sinks(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    packed_rows: PackedRows | None,
    sinks_H: torch.Tensor,
    options: dict[str, Any],
) -> torch.Tensor:
    """Attention with sinks, (B, H, T, D) → (B, T, H, D); packed rows one after the other."""
    cached = query.shape[2] != key.shape[2]
    if options.get("dropout") or (cached and not module.training):
        return attention_by_scores(module, query, key, value, mask, s_aux=sinks_H, **options)
    if torch.is_autocast_enabled(query.device.type):  # Autocast does not reach the kernels, which are called directly.
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if cached:
        config: Any = module.config
        raise UserError(
            f"model.name: {config.model_type} attends to more than the tokens of a row, which is not supported "
            "yet; choose another model"
        )
    groups, capability = query.shape[1] // key.shape[1], gpu_capability(query)
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    flash = capability is not None and mask is None and takes_flash(query, capability)
    kernel = "cpu" if capability is None else "flash" if flash else "efficient"
    lengths = (query.shape[2],) if packed_rows is None else packed_rows.lengths
    rows = zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True)
    scale = options.get("scaling")
    done = [sink_attention(q, k, v, mask, sinks_H, scale, kernel=kernel) for q, k, v in rows]
    return done[0] if packed_rows is None else torch.cat(done, dim=1)


def _eager_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed_rows: PackedRows | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer with explicit scores; packed rows one after the other."""
    note_rows(packed_rows)
    if packed_rows is None:
        return attention_by_scores(module, query, key, value, attention_mask, **kwargs), None
    rows = zip(*(tensor.split(packed_rows.lengths, dim=2) for tensor in (query, key, value)), strict=True)
    return torch.cat([attention_by_scores(module, q, k, v, None, **kwargs) for q, k, v in rows], dim=1), None


def _flash_attention(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of one layer by FlashAttention-2; raises where it cannot run."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return _attention(*args, **kwargs)


class _LocalHeads:
    """An attention module whose query heads share keys and values in groups of another size."""

    def __init__(self, module: torch.nn.Module, groups: int):
        self._module, self.num_key_value_groups = module, groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _exchanging(attention: Kernel) -> Kernel:
    """Wrap `attention`: under context parallelism it computes this process's heads of complete rows."""

    def exchanged(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        exchange: TokenExchange | None = None,
        s_aux: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if current.parts > 1:
            current.got_rows.append(exchange is not None)
        if exchange is None:
            return attention(module, query, key, value, attention_mask, s_aux=s_aux, **kwargs)
        copies = key_copies(query.shape[1], key.shape[1], exchange.parts)
        if copies > 1:
            module = _LocalHeads(module, query.shape[1] // key.shape[1] // copies)
        query, key, value = (
            exchange.to_heads(heads) for heads in (query, repeat_kv(key, copies), repeat_kv(value, copies))
        )
        if s_aux is not None:
            s_aux = s_aux.chunk(exchange.parts)[exchange.index]
        out, _ = attention(module, query, key, value, attention_mask, s_aux=s_aux, **kwargs)
        return exchange.to_tokens(out), None

    return exchanged


def _mask(*, kv_length: int, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor | None:
    """None for plain causal attention, else transformers' mask; under context parallelism it covers complete rows.

    transformers would read tensor values to decide, which fake tensors do not have; deciding from the arguments gives
    real and fake tensors the same mask.
    """
    window = kwargs.get("local_size")
    if current.parts > 1:
        kv_length, kwargs["q_length"] = kv_length * current.parts, kwargs["q_length"] * current.parts
    of_images = current.keeps_masks and not kwargs.get("allow_is_causal_skip", True)
    if attention_mask is None and not of_images and (current.rows_are_packed or window is None or kv_length < window):
        return None
    return sdpa_mask(kv_length=kv_length, attention_mask=attention_mask, **kwargs)


for name, function in {
    ATTENTION: _attention,
    CAPPED_ATTENTION: _attention,
    EAGER_ATTENTION: _eager_attention,
    FLASH_ATTENTION: _flash_attention,
}.items():
    AttentionInterface.register(name, _exchanging(function))
    AttentionMaskInterface.register(name, _mask)
