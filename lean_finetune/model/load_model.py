"""Load models: with real weights from a local directory, or with fake or uninitialised weights from a config."""

import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME
from transformers.utils import logging as transformers_logging

from lean_finetune.config.schema import BaseWeights, Train
from lean_finetune.core.errors import UserError
from lean_finetune.core.optional_bitsandbytes import bnb
from lean_finetune.model.adapter_init import start_adapters
from lean_finetune.model.adapters import add_adapters
from lean_finetune.model.attention_choice import of_parts, training_attention
from lean_finetune.model.beside.parts import freeze_parts
from lean_finetune.model.checkpointing import enable_checkpointing, enable_tiles
from lean_finetune.model.continued_adapter import load_start
from lean_finetune.model.dropout import switch_off_dropout
from lean_finetune.model.empty_model import (
    SCORE,
    causal_kind,
    keep_in_fp32,
    meta_model,
    refuse_other_heads,
    start_score,
)
from lean_finetune.model.experts.experts_forward import EXPERTS_OPTION, prepare_routers
from lean_finetune.model.experts.grouped_matmul import register_scales
from lean_finetune.model.files.finite_values import finite_tensors
from lean_finetune.model.files.quantized_checkpoint import file_tensors, kept_modules, without_quantisation
from lean_finetune.model.fused_kernels import fuse_kernels
from lean_finetune.model.joined_adapters.join import join_adapters
from lean_finetune.model.kernels.fuse_layers import fuse_layers
from lean_finetune.model.norms.fused_norms import fuse_norms
from lean_finetune.model.precision import base_dtype
from lean_finetune.model.quantize import keep_trainable_on_cpu, quantisation, quantize_on_meta, refuse_other_method
from lean_finetune.pinning.config_file import json_object

PACKED_ATTRIBUTES = (
    *("quant_state", "blocksize", "quant_type", "bnb_quantized", "quant_storage", "module"),
    *("CB", "SCB", "has_fp16_weights"),
)
"""Attributes that bitsandbytes sets on a 4-bit or an 8-bit parameter."""

NO_THREADS = "HF_DEACTIVATE_ASYNC_LOAD"
"""Environment variable that makes transformers load without threads."""

transformers_logging.disable_progress_bar()
LOG = transformers_logging.get_logger(__name__)


def replace_forwards(model: PreTrainedModel, train: Train) -> None:
    """Let a model with its adapters recompute, join, fuse and tile layers as `train` says; its tensors stay.

    Raises:
        UserError: the model does not support a switch.
    """
    enable_checkpointing(model, train)
    join_adapters(model, train)
    fuse_norms(model, train)
    fuse_kernels(model, train.fused_kernels)
    fuse_layers(model, train)
    enable_tiles(model, train)


def load_model(
    directory: Path,
    config: PretrainedConfig,
    train: Train,
    device: torch.device,
    seed: int = 0,
    adapter: Path | None = None,
) -> nn.Module:
    """A model ready for training: weights loaded and quantised, adapters added, checkpointing set.

    `config` is that of the directory, as `read_config` gives it. `seed` seeds what adapters, and a new head of a reward
    model, start from. `adapter` is the directory of one that goes on.

    Raises:
        UserError: weights are missing, do not fit the config, or cannot be read.
    """
    refuse_other_method(config, train)
    attention = training_attention(config, train.attention)
    model = load_base(directory, config, train, device, attention, seed=seed)
    freeze_parts(model, train)
    adapted: nn.Module = model
    if train.adapted:
        adapted = add_adapters(model, train, seed=seed)
        start_adapters(adapted, train, directory, seed)
        if adapter is not None:
            load_start(adapted, adapter)
    else:
        prepare_routers(model, train.router)
    switch_off_dropout(model, train)
    replace_forwards(model, train)
    return adapted.train()


def load_base(
    directory: Path,
    config: PretrainedConfig,
    weights: BaseWeights,
    device: torch.device,
    attention: str | None = None,
    *,
    seed: int | None = None,
) -> PreTrainedModel:
    """The base model, or a reward model, as its config says; a head that its files lack starts from `seed`, if given.

    Weights are read one at a time; each is converted and quantised before the next is read.
    Weights in MXFP4 or FP8 are unpacked first; those that bitsandbytes packed are taken as they are.

    Raises:
        UserError: weights are missing, do not fit the config, are not finite, or cannot be read.
    """
    config_of_weights = quantisation(weights, kept_modules(config))
    quantized: dict[str, Any] = {} if config_of_weights is None else {"quantization_config": config_of_weights}
    with warnings.catch_warnings(), _threads_on_gpu_only(device), _without_load_report():
        warnings.simplefilter("ignore", FutureWarning)
        try:
            tensors = finite_tensors(file_tensors(directory, config))
            kind, own_config = causal_kind(without_quantisation(deepcopy(config)))
            loaded: Any = kind.from_pretrained(
                None,
                state_dict=tensors,
                config=own_config,
                dtype=base_dtype(weights),
                attn_implementation=of_parts(own_config, attention or training_attention(config)),
                **EXPERTS_OPTION,
                device_map={"": device},
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # Refused below, by name.
                **quantized,
            )
        except (OSError, ValueError, KeyError, SafetensorError, RuntimeError) as error:
            first = str(error).splitlines()[0]
            raise UserError(
                f"model.name: weights in {directory} cannot be loaded ({first}); replace the files"
            ) from None
    model, info = loaded
    new_head = f"{SCORE}.weight"
    if seed is not None and new_head in info["missing_keys"]:
        info["missing_keys"] = set(info["missing_keys"]) - {new_head}
        start_score(model, seed)
    for fault in ("missing_keys", "mismatched_keys"):
        if info[fault]:
            raise UserError(
                f"model.name: {directory}: {len(info[fault])} {fault.replace('_', ' ')}, "
                f"first {_first_name(info[fault])}; the weights do not belong to config.json"
            )
    if (unread := info["unexpected_keys"]) and not hasattr(model, SCORE):  # It has no head of a language model.
        LOG.warning(f"{directory}: {len(unread)} weights are not part of the model, first {_first_name(unread)}")
    refuse_other_heads(model)
    register_scales(model)
    model.generation_config = read_generation_config(directory)
    keep_trainable_on_cpu(model)
    return model


def _first_name(keys: Iterable[Any]) -> str:
    """The first of weights' names, or of tuples of a name with shapes."""
    return min(key if isinstance(key, str) else str(key[0]) for key in keys)


@contextmanager
def _without_load_report() -> Iterator[None]:
    """A context in which transformers logs no table of the weights that do not fit; the caller has them by name."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


@contextmanager
def _threads_on_gpu_only(device: torch.device) -> Iterator[None]:
    """A context in which transformers loads in threads on GPUs only.

    On a CPU threads save no time, and the memory profiler does not see their allocations.
    """
    before = os.environ.get(NO_THREADS)
    if device.type == "cpu":
        os.environ[NO_THREADS] = "1"
    try:
        yield
    finally:
        os.environ.pop(NO_THREADS, None)
        if before is not None:
            os.environ[NO_THREADS] = before


def read_generation_config(directory: Path) -> GenerationConfig:
    """The generation config: from its own file, or from config.json.

    Raises:
        UserError: the file is damaged, or its eos_token_id are no ids.
    """
    options: dict[str, Any] = {"config_file_name": CONFIG_NAME, "_from_model_config": True}
    path = directory / GENERATION_CONFIG_NAME
    if path.is_file():
        json_object(path)
    try:
        config = GenerationConfig.from_pretrained(
            str(directory), local_files_only=True, **({} if path.is_file() else options)
        )
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"model.name: {path} cannot be read ({str(error).splitlines()[0]}); download or save it again"
        ) from None
    ends = config.eos_token_id
    if not all(type(each) is int for each in (ends if isinstance(ends, list) else [ends]) if each is not None):
        raise UserError(f"model.name: {path}: eos_token_id must be token ids; got {ends!r}; correct it")
    return config


def fake_model(config: PretrainedConfig, train: Train, device: torch.device, *, adapted: bool = True) -> nn.Module:
    """The model of `load_model` on fake tensors: shapes, types and ties without storage.

    Without `adapted`, that of `load_base`. Call under an active FakeTensorMode.

    Raises:
        UserError: the model does not support our attention, or train.lora.targets names no layer.
    """
    if detect_fake_mode() is None:
        raise RuntimeError("fake_model must be called under a FakeTensorMode")
    return uninitialized_model(config, train, device, adapted=adapted)


def uninitialized_model(
    config: PretrainedConfig, train: Train, device: torch.device, *, adapted: bool = True
) -> nn.Module:
    """The model of `load_model` with uninitialised weights, whose pages take no memory until they are written.

    It is built on the meta device first, because initialisers and quantisers run there.

    Raises:
        UserError: as `fake_model`.
    """
    refuse_other_method(config, train)
    attention = of_parts(config, training_attention(config, train.attention))
    model = meta_model(config, dtype=base_dtype(train), attn_implementation=attention)
    keep_in_fp32(model, base_dtype(train))
    with unset_fake_temporarily(), torch.device("meta"), init.no_init_weights():
        if quantisation(train) is not None:
            quantize_on_meta(model, train)
        freeze_parts(model, train)
        trained = add_adapters(model, train, seed=None) if train.adapted and adapted else model
        if train.method == "full":
            prepare_routers(model, train.router)
    switch_off_dropout(model, train)
    replace_forwards(model, train)
    keep_trainable_on_cpu(trained)
    _materialize(trained, train, device)
    return trained.train()


def _materialize(model: nn.Module, train: Train, device: torch.device) -> None:
    """Replace meta tensors by empty ones on `device`; a tensor shared by several modules stays shared."""
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def empty(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            new = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, tensor.requires_grad)
                # bitsandbytes reads its state from the parameter; a fake tensor cannot be an instance of its classes.
                for key in PACKED_ATTRIBUTES:
                    if hasattr(tensor, key):
                        setattr(new, key, getattr(tensor, key))
            # A reference to the original prevents that another tensor gets its id.
            made[id(tensor)] = (tensor, new)
        return made[id(tensor)][1]

    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in list(tensors.items()):
                if tensor is not None and tensor.device.type == "meta":
                    tensors[name] = empty(tensor)  # type: ignore[assignment]
        state = getattr(module, "quant_state", None)
        if state is not None:
            if train.lora.dora:
                _dequantize_for_dora(module)
            state.absmax, state.code = empty(state.absmax), empty(state.code)
            if state.nested:
                state.offset = empty(state.offset)
                state.state2.absmax, state.state2.code = empty(state.state2.absmax), empty(state.state2.code)
        if isinstance(module, bnb.nn.Linear8bitLt):
            module.state.CB, module.state.SCB = module.weight.data, empty(module.state.SCB)  # type: ignore[arg-type]


def _dequantize_for_dora(layer: Any) -> None:
    """Let peft dequantise a fake 4-bit weight for DoRA as it does a real one.

    peft recognises a 4-bit weight by its class, which a fake tensor cannot have. First it tries the layer's own
    `dequantize`, if the layer has the attribute W_q of another library.
    """
    layer.W_q = True
    layer.dequantize = lambda: bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
