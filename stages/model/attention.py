"""The attention of every training step: causal, unmasked, by PyTorch's scaled-dot-product kernels.

Rows are padded on the right, so a causal model never lets a real token see padding and no mask is needed. Without a
mask the flash kernel stays usable and no (batch, 1, length, length) tensor exists. The same functions run on real and
on fake tensors; only the kernel at the bottom can be replaced, so that a trace on the CPU can ask for what a GPU runs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ATTENTION = "lean_sdpa"
FLASH_CAPABILITY = (8, 0)
FLASH_MAX_HEAD_SIZE = 256

Kernel = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
_kernel: Kernel = sdpa_attention_forward


def takes_flash(query: torch.Tensor, capability: tuple[int, int]) -> bool:
    """Whether CUDA's flash kernel takes this query (B, heads, T, head size): 16-bit, Ampere or later, no huge heads."""
    half = query.dtype in (torch.bfloat16, torch.float16)
    return half and capability >= FLASH_CAPABILITY and query.shape[-1] <= FLASH_MAX_HEAD_SIZE


def _attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of one layer; shapes as in transformers' attention interface."""
    if query.device.type == "cuda" and not takes_flash(query, torch.cuda.get_device_capability(query.device)):
        # Not every PyTorch's memory-efficient kernel groups heads: it would fall back to all length × length scores.
        groups = query.shape[1] // key.shape[1]
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    return _kernel(module, query, key, value, *args, **kwargs)


def _mask(*, kv_length: int, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor | None:
    """None for plain causal attention, else transformers' mask.

    transformers cannot see that position ids are unpacked when tensors are fake and would then build a mask that real
    training never has; deciding from the arguments alone keeps both alike.
    """
    window = kwargs.get("local_size")
    if attention_mask is None and (window is None or kv_length < window):
        return None
    return sdpa_mask(kv_length=kv_length, attention_mask=attention_mask, **kwargs)


@contextmanager
def attention_kernel(kernel: Kernel) -> Iterator[None]:
    """Run attention by another kernel inside the block; used by estimate to trace what a GPU would run."""
    global _kernel
    before, _kernel = _kernel, kernel
    try:
        yield
    finally:
        _kernel = before


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, _mask)
