"""A model with its adapters merged: read and written tensor by tensor, so that one weight is in memory at a time.

Shape legend: a weight is N × K; adapters of rank R are A (R × K) and B (N × R).
"""

import math
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import torch
from safetensors.torch import load_file

from lean_finetune.core.atomic_files import read_json
from lean_finetune.core.errors import UserError
from lean_finetune.model.adapter_init import PEFT_PREFIX
from lean_finetune.model.empty_model import meta_model
from lean_finetune.model.model_config import read_config
from lean_finetune.model.model_spec import WeightsSpec
from lean_finetune.model.quantize import INT8_LARGEST, quantisation, quantize_on_meta
from lean_finetune.model.safetensors_files import StoredTensor, TensorSpec, stored_tensors, write_tensors

SUFFIX = ".safetensors"
MERGED = "merged"
"""Directory of the merged model beside its adapter."""


def write_merged(base: Path, files: Iterable[str], adapter: Path, spec: WeightsSpec, out: Path) -> None:
    """Write the whole model to `out` in the types of the base's files.

    Weights that were trained against in 4 or 8 bits go through them here too: adapters learnt to mend what those bits
    lost, and would mend again what a merge onto the original weights never lost.

    Args:
        base: the base model's directory.
        files: its files to take along: weights, config.
        adapter: directory of the saved adapter, on the weights of `base`.
        spec: how the base was held in training.
        out: an existing directory.

    Raises:
        UserError: the base has no weight for an adapter.
    """
    config = read_json(adapter / "adapter_config.json")
    tensors = load_file(adapter / "adapter_model.safetensors")
    packed = _packed_layers(base, spec)
    waiting = {_layer(key) for key in tensors}
    for name in sorted(files):
        if not name.endswith(SUFFIX):
            shutil.copyfile(base / name, out / name)
            continue
        stored = stored_tensors(base / name)
        forms = {key: TensorSpec(dtype=one.dtype, shape=one.shape) for key, one in stored.items()}

        def merged(key: str, stored: Mapping[str, StoredTensor] = stored) -> torch.Tensor:
            layer, weight = key.removesuffix(".weight"), stored[key].read()
            if layer not in packed and layer not in waiting:
                return weight
            held_NK = _as_held(weight, spec, layer in packed)
            if layer in waiting:
                held_NK = _with_adapter(held_NK, layer, tensors, config)
                waiting.remove(layer)
            return held_NK.to(weight.dtype)

        write_tensors(out / name, forms, merged)
    if waiting:
        raise UserError(
            f"train.merge: {base} holds no weight of its own for {sorted(waiting)[0]}, which has an adapter; set "
            "train.merge=false"
        )


def _layer(key: str) -> str:
    """The adapted layer of a tensor in an adapter's file."""
    return key.removeprefix(PEFT_PREFIX).partition(".lora_")[0]


def _packed_layers(base: Path, spec: WeightsSpec) -> set[str]:
    """Names of the layers that training holds in 4 or 8 bits."""
    if quantisation(spec) is None:
        return set()
    model = meta_model(read_config(base))
    quantize_on_meta(model, spec)
    kinds = (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt)
    return {name for name, module in model.named_modules() if isinstance(module, kinds)}


def _as_held(stored: torch.Tensor, spec: WeightsSpec, packed: bool) -> torch.Tensor:
    """A stored weight as training held it, fp32."""
    weight = stored.to(spec.dtype)
    if not packed:
        return weight.float()
    if spec.method == "int8_lora":
        values, scales, _ = bnb.functional.int8_vectorwise_quant(weight.half(), threshold=0.0)
        return values.float() * (scales / INT8_LARGEST)[:, None]
    four, state = bnb.functional.quantize_4bit(
        weight, compress_statistics=spec.double_quant, quant_type=spec.quant_type
    )
    return bnb.functional.dequantize_4bit(four, state).float()


def _with_adapter(
    held_NK: torch.Tensor, layer: str, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]
) -> torch.Tensor:
    """The weight with what its adapter adds; with DoRA, its rows at their learnt lengths."""
    key = f"{PEFT_PREFIX}{layer}.lora_"
    A_RK, B_NR = tensors[f"{key}A.weight"].float(), tensors[f"{key}B.weight"].float()
    rank, alpha = config["r"], config["lora_alpha"]
    scale = alpha / (math.sqrt(rank) if config["use_rslora"] else rank)
    merged_NK = held_NK + scale * (B_NR @ A_RK)
    lengths_N = tensors.get(f"{key}magnitude_vector")
    if lengths_N is None:
        return merged_NK
    return merged_NK * (lengths_N.float() / torch.linalg.norm(merged_NK, dim=1))[:, None]
