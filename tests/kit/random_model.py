"""Build a model of random weights on a device from its configuration alone, as stage train loads one from files."""

import gc
from typing import Any

import bitsandbytes as bnb
import torch
from torch import nn
from transformers import PretrainedConfig
from transformers import initialization as init
from transformers.integrations import replace_with_bnb_linear
from transformers.quantizers.base import get_keys_to_not_convert

from lean_finetune.config.schema import Train
from lean_finetune.model.adapters import add_adapters
from lean_finetune.model.attention_choice import training_attention
from lean_finetune.model.empty_model import causal_kind
from lean_finetune.model.experts.experts_forward import EXPERTS_OPTION, prepare_routers
from lean_finetune.model.load_model import replace_forwards
from lean_finetune.model.precision import base_dtype
from lean_finetune.model.quantize import keep_trainable_on_cpu, quantisation

INIT_STD = 0.02
"""Standard deviation of the random weights: that of most models' initialisation."""


def random_model(config: PretrainedConfig, spec: Train, device: torch.device) -> nn.Module:
    """Make the model that `lean_finetune.model.load_model.load_model` would load, with random weights."""
    model = base_model(config, spec, device)
    if spec.method == "full":
        prepare_routers(model, spec.router)
    adapted = model if spec.method == "full" else add_adapters(model, spec, seed=1)
    replace_forwards(model, spec)
    return adapted.train()


def base_model(config: PretrainedConfig, spec: Train, device: torch.device) -> Any:
    """Make the same model without adapters and checkpointing."""
    attention = training_attention(config, spec.attention)
    kind, own_config = causal_kind(config)
    with torch.device(device), init.no_init_weights():
        model = kind._from_config(own_config, dtype=base_dtype(spec), attn_implementation=attention, **EXPERTS_OPTION)
    model.tie_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=INIT_STD)
    if quantisation(spec) is not None:
        _quantize(model, spec, device)
    return model


def _quantize(model: Any, spec: Train, device: torch.device) -> None:
    """Put random 4 or 8-bit weights into the layers that loading would quantise."""
    replace_with_bnb_linear(model, get_keys_to_not_convert(model), quantisation(spec))
    # peft reads these attributes to choose its adapters for quantised layers.
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = spec.method == "qlora", spec.method == "int8_lora"
    for layer in model.modules():
        if not isinstance(layer, bnb.nn.Linear4bit | bnb.nn.Linear8bitLt):
            continue
        values = torch.empty((layer.out_features, layer.in_features), dtype=base_dtype(spec), device=device)
        layer.weight = _quantized(values.normal_(std=INIT_STD), spec, device)
        if layer.bias is not None:
            bias = torch.empty(layer.out_features, dtype=base_dtype(spec), device=device).normal_(std=INIT_STD)
            layer.bias = nn.Parameter(bias, requires_grad=False)
    keep_trainable_on_cpu(model)


def _quantized(values: torch.Tensor, spec: Train, device: torch.device) -> Any:
    """A weight in 4 or 8 bits. bitsandbytes quantises when it moves to its device; in 8 bits only from the CPU."""
    weight: Any
    if spec.method == "int8_lora":
        weight = bnb.nn.Int8Params(values.cpu(), requires_grad=False, has_fp16_weights=False)
    else:
        weight = bnb.nn.Params4bit(
            values, requires_grad=False, compress_statistics=spec.quant.double, quant_type=spec.quant.type
        )
    return weight.to(device)


def free_cached() -> None:
    """Free what was left on the GPU, libraries' workspaces too, so that what follows starts from the same state."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
