"""Merge adapters into a model, read and written tensor by tensor, so that one weight is in memory at a time.

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
from transformers import PretrainedConfig

from lean_finetune.config.train_schema import BaseWeights
from lean_finetune.core.atomic_files import read_json
from lean_finetune.core.errors import UserError
from lean_finetune.model.adapter_init import PEFT_PREFIX
from lean_finetune.model.adapters import take_experts
from lean_finetune.model.empty_model import meta_model
from lean_finetune.model.files.quantized_checkpoint import (
    BitsAndBytesWeight,
    file_tensors,
    stored_format,
    write_16_bit_config,
)
from lean_finetune.model.files.safetensors_files import FileTensor, TensorSpec, write_tensors
from lean_finetune.model.language_part import names_in_model
from lean_finetune.model.merge.merge_experts import MergedExperts
from lean_finetune.model.model_config import read_config
from lean_finetune.model.quantize import as_trained, quantisation, quantize_on_meta

SUFFIX = ".safetensors"
MERGED = "merged"
"""Subdirectory of the merged model, next to its adapter."""


def write_merged(base: Path, files: Iterable[str], adapter: Path, weights: BaseWeights, out: Path) -> None:
    """Write the merged model to `out` in the types of the base's files; weights that are quantised there in bf16.

    Weights that training quantised while loading are quantised and dequantised here too: the adapters learnt to
    correct that error, which the original weights do not have.

    Args:
        base: the base model's directory.
        files: files to merge or copy: weights, config.
        adapter: directory of the saved adapter.
        weights: number format of the base in training.
        out: an existing directory.

    Raises:
        UserError: the base has no weight for an adapter.
    """
    config = read_json(adapter / "adapter_config.json")
    tensors = load_file(adapter / "adapter_model.safetensors")
    base_config = read_config(base)
    model, tensors_of_base = meta_model(base_config), file_tensors(base, base_config)
    packed = [name for name, one in tensors_of_base.items() if isinstance(one, BitsAndBytesWeight)]
    packed_layers = (name.removesuffix(".weight") for name in names_in_model(model, packed).values())
    quantised = _quantised_layers(base_config, weights).difference(packed_layers)
    experts = MergedExperts(tensors_of_base, model, weights, take_experts(base_config, adapter, tensors))
    unmerged = {_layer(key) for key in tensors}
    for name in sorted(files):
        if not name.endswith(SUFFIX):
            shutil.copyfile(base / name, out / name)
            continue
        stored = {key: one for key, one in tensors_of_base.items() if one.path == base / name}
        specs = {key: TensorSpec(dtype=one.dtype, shape=one.shape) for key, one in stored.items()}
        names = names_in_model(model, stored)

        def merged(
            key: str, stored: Mapping[str, FileTensor] = stored, names: Mapping[str, str] = names
        ) -> torch.Tensor:
            if key in experts:
                return experts.merged(key)
            layer, weight = names[key].removesuffix(".weight"), stored[key].read()
            if layer not in quantised and layer not in unmerged:
                return weight
            weight_NK = as_trained(weight, weights, layer in quantised)
            if layer in unmerged:
                weight_NK = _with_adapter(weight_NK, layer, tensors, config)
                unmerged.remove(layer)
            return weight_NK.to(weight.dtype)

        write_tensors(out / name, specs, merged)
    if stored_format(base_config) is not None:
        write_16_bit_config(out, tensors_of_base)
    if unmerged:
        raise UserError(
            f"train.merge: {base} has no weight for {sorted(unmerged)[0]}, which has an adapter; set train.merge=false"
        )


def refuse_merge(base: Path, weights: BaseWeights, *, experts: bool) -> None:
    """Refuse to merge into experts that training packs or adapts, if the files have them in an unknown form.

    Args:
        base: the base model's directory.
        weights: number format of the base in training.
        experts: whether they have adapters.

    Raises:
        UserError: naming the remedy.
    """
    config = read_config(base)
    if (experts or quantisation(weights) is not None) and (
        missing := MergedExperts(file_tensors(base, config), meta_model(config), weights, {}).missing
    ):
        raise UserError(
            f"train.merge: the files of {config.model_type} have {missing[0]} in a form that cannot be merged; got "
            "true; set it to false"
        )


def _layer(key: str) -> str:
    """The adapted layer of a tensor in an adapter's file."""
    return key.removeprefix(PEFT_PREFIX).partition(".lora_")[0]


def _quantised_layers(config: PretrainedConfig, weights: BaseWeights) -> set[str]:
    """Names of the layers that training quantises."""
    if quantisation(weights) is None:
        return set()
    model = meta_model(config)
    quantize_on_meta(model, weights)
    kinds = (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt)
    return {name for name, module in model.named_modules() if isinstance(module, kinds)}


def _with_adapter(
    weight_NK: torch.Tensor, layer: str, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]
) -> torch.Tensor:
    """The weight plus its adapter; with DoRA, rows scaled to their learnt norms."""
    key = f"{PEFT_PREFIX}{layer}.lora_"
    A_RK, B_NR = tensors[f"{key}A.weight"].float(), tensors[f"{key}B.weight"].float()
    rank, alpha = config["r"], config["lora_alpha"]
    scale = alpha / (math.sqrt(rank) if config["use_rslora"] else rank)
    merged_NK = weight_NK + scale * (B_NR @ A_RK)
    lengths_N = tensors.get(f"{key}magnitude_vector")
    if lengths_N is None:
        return merged_NK
    return merged_NK * (lengths_N.float() / torch.linalg.norm(merged_NK, dim=1))[:, None]
