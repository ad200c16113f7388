"""4-bit NF4 weights with double quantisation (bitsandbytes; Dettmers et al. 2023, arXiv 2305.14314)."""

import bitsandbytes as bnb
import torch
from bitsandbytes.functional import QuantState
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.integrations import replace_with_bnb_linear
from transformers.quantizers.base import get_keys_to_not_convert

# bitsandbytes' own constants: weights per absmax, and absmax values per second-level absmax.
BLOCK_WEIGHTS = 64
NESTED_BLOCK_VALUES = 256
NF4_LEVELS = 16
BYTE_LEVELS = 256


def nf4_config(dtype: torch.dtype) -> BitsAndBytesConfig:
    """The quantisation of `train.method: qlora`: NF4, double quantisation, arithmetic in `dtype`."""
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def keep_trainable_on_cpu(model: nn.Module) -> None:
    """Stop bitsandbytes from repacking 4-bit weights in a no-grad forward on CPUs with AVX512-BF16.

    After the repack, training silently goes through a kernel without gradients (median relative error of the adapters'
    gradients 0.95 with a normal-looking loss). Call after every load and every merge.
    """
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = False


def quantize_on_meta(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Replace the linear layers of a model on the meta device as transformers would, with hand-built 4-bit states.

    The same layers are skipped (head and tied weights), so shapes and bytes equal those of a really quantised model.
    """
    replace_with_bnb_linear(model, get_keys_to_not_convert(model), nf4_config(dtype))
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            _hold_packed_weight(module, dtype)


def _hold_packed_weight(layer: bnb.nn.Linear4bit, dtype: torch.dtype) -> None:
    """Give a meta layer the packed weight and quantisation state that quantising would have made."""
    weights = layer.out_features * layer.in_features
    blocks = -(-weights // BLOCK_WEIGHTS)
    state = QuantState(
        absmax=_meta(blocks, torch.uint8),
        shape=torch.Size((layer.out_features, layer.in_features)),
        dtype=dtype,
        blocksize=BLOCK_WEIGHTS,
        code=_meta(NF4_LEVELS, torch.float32),
        quant_type="nf4",
        offset=torch.empty((), dtype=torch.float32, device="meta"),
        state2=QuantState(
            absmax=_meta(-(-blocks // NESTED_BLOCK_VALUES), torch.float32),
            code=_meta(BYTE_LEVELS, torch.float32),
            blocksize=NESTED_BLOCK_VALUES,
            dtype=torch.float32,
        ),
    )
    layer.weight = bnb.nn.Params4bit(
        torch.empty((-(-weights // 2), 1), dtype=torch.uint8, device="meta"),
        requires_grad=False,
        quant_state=state,
        blocksize=BLOCK_WEIGHTS,
        compress_statistics=True,
        quant_type="nf4",
        bnb_quantized=True,
        module=layer,
    )
    layer.quant_state = state
    if layer.bias is not None:  # Made in fp32 with the layer; loading gives it the type of all other weights.
        layer.bias = nn.Parameter(layer.bias.to(dtype), requires_grad=False)


def _meta(values: int, dtype: torch.dtype) -> torch.Tensor:
    """A one-dimensional tensor without storage."""
    return torch.empty(values, dtype=dtype, device="meta")


def quantisation_tensors(model: nn.Module) -> list[torch.Tensor]:
    """The tensors beside the packed weights: block scales, second-level scales, offsets and code books."""
    tensors = []
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit) and module.quant_state is not None:
            state = module.quant_state
            tensors += [state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code]
    return tensors
