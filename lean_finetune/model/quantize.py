"""Quantise frozen weights to 4 or 8 bits with bitsandbytes (Dettmers et al., arXiv 2305.14314 and 2208.07339)."""

import logging
from typing import Any

import bitsandbytes as bnb
import torch
from bitsandbytes.functional import QuantState
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.integrations import replace_with_bnb_linear
from transformers.quantizers.base import get_keys_to_not_convert

from lean_finetune.model.model_spec import WeightsSpec

# It warns for every type but fp16 that 8-bit products use fp16 inputs; docs/memory-switches.md says so too.
logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)

# bitsandbytes' own constants: weights per absmax, and absmax values per second-level absmax.
BLOCK_WEIGHTS = 64
NESTED_BLOCK_VALUES = 256
LEVELS_4BIT = 16
BYTE_LEVELS = 256
INT8_LARGEST = 127
OUTLIER_THRESHOLD = 6.0
"""Input columns with a larger value are multiplied in 16 bits (LLM.int8(), section 3.2)."""


def quantisation(spec: WeightsSpec) -> BitsAndBytesConfig | None:
    """The quantisation config of the frozen weights; None without quantisation."""
    if spec.method == "int8_lora":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=OUTLIER_THRESHOLD)
    if spec.method == "qlora":
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=spec.quant_type,
            bnb_4bit_use_double_quant=spec.double_quant,
            bnb_4bit_compute_dtype=spec.dtype,
        )
    return None


def keep_trainable_on_cpu(model: nn.Module) -> None:
    """Stop bitsandbytes from repacking 4-bit weights in a no-grad forward on CPUs with AVX512-BF16.

    After the repack, training silently uses a kernel without gradients (median relative error of the adapters'
    gradients 0.95 with a normal-looking loss). Call after every load and every merge.
    """
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = False


def quantize_on_meta(model: PreTrainedModel, spec: WeightsSpec) -> None:
    """Replace the linear layers of a meta model as transformers would, with hand-made quantisation states.

    The same layers are skipped (head and tied weights), so shapes and bytes equal those of a quantised model.
    """
    replace_with_bnb_linear(model, get_keys_to_not_convert(model), quantisation(spec))
    # peft chooses adapters for quantised layers by these attributes.
    attributes: Any = model
    attributes.is_loaded_in_4bit, attributes.is_loaded_in_8bit = spec.method == "qlora", spec.method == "int8_lora"
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            _set_4bit_weight(module, spec)
        elif isinstance(module, bnb.nn.Linear8bitLt):
            _set_8bit_weight(module)
        else:
            continue
        if module.bias is not None:  # The layer makes it in fp32; loading would convert it like all other weights.
            module.bias = nn.Parameter(module.bias.to(spec.dtype), requires_grad=False)


def _set_4bit_weight(layer: bnb.nn.Linear4bit, spec: WeightsSpec) -> None:
    """Give a meta layer the packed weight and state that quantising would make."""
    weights = layer.out_features * layer.in_features
    blocks = -(-weights // BLOCK_WEIGHTS)
    nested = QuantState(
        absmax=_meta(-(-blocks // NESTED_BLOCK_VALUES), torch.float32),
        code=_meta(BYTE_LEVELS, torch.float32),
        blocksize=NESTED_BLOCK_VALUES,
        dtype=torch.float32,
    )
    state = QuantState(
        absmax=_meta(blocks, torch.uint8 if spec.double_quant else torch.float32),
        shape=torch.Size((layer.out_features, layer.in_features)),
        dtype=spec.dtype,
        blocksize=BLOCK_WEIGHTS,
        code=_meta(LEVELS_4BIT, torch.float32),
        quant_type=spec.quant_type,
        offset=torch.empty((), dtype=torch.float32, device="meta") if spec.double_quant else None,
        state2=nested if spec.double_quant else None,
    )
    layer.weight = bnb.nn.Params4bit(
        torch.empty((-(-weights // 2), 1), dtype=torch.uint8, device="meta"),
        requires_grad=False,
        quant_state=state,
        blocksize=BLOCK_WEIGHTS,
        compress_statistics=spec.double_quant,
        quant_type=spec.quant_type,
        bnb_quantized=True,
        module=layer,
    )
    layer.quant_state = state


def _set_8bit_weight(layer: bnb.nn.Linear8bitLt) -> None:
    """Give a meta layer the 8-bit weight and the scale of each of its rows, as after its first forward."""
    shape = (layer.out_features, layer.in_features)
    weight = torch.empty(shape, dtype=torch.int8, device="meta")
    layer.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    layer.state.CB, layer.state.SCB = layer.weight.data, _meta(layer.out_features, torch.float32)


def _meta(values: int, dtype: torch.dtype) -> torch.Tensor:
    """A one-dimensional tensor without storage."""
    return torch.empty(values, dtype=dtype, device="meta")


def quantisation_tensors(model: nn.Module) -> list[torch.Tensor]:
    """The tensors of quantisation states: block or row scales, second-level scales, offsets and code books."""
    tensors = []
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit) and module.quant_state is not None:
            state = module.quant_state
            tensors += [state.absmax, state.code]
            if state.nested:
                tensors += [state.offset, state.state2.absmax, state.state2.code]
        elif isinstance(module, bnb.nn.Linear8bitLt):  # Its first forward moves the scales to the layer.
            scales = (getattr(module.weight, "SCB", None), module.state.SCB)
            tensors += [scale for scale in scales if scale is not None]
    return tensors
