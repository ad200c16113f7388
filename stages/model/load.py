"""Models with real weights, from a local directory of safetensors, or with fake weights, from its config alone."""

import warnings
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import torch
from safetensors import SafetensorError
from torch import nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.models.auto.auto_factory import _get_model_class
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME
from transformers.utils import logging as transformers_logging

from stages.errors import UserError
from stages.model.adapters import add_adapters
from stages.model.attention import caps_scores, training_attention
from stages.model.checkpointing import enable_checkpointing
from stages.model.loading_threads import loading_threads
from stages.model.quantize import keep_trainable_on_cpu, quantisation, quantize_on_meta
from stages.model.spec import ModelSpec, WeightsSpec
from stages.model.start import start_from_weights
from stages.model.tensor_files import model_tensors

# Each scales or bends the logits after the head; the step below the head would miss it.
UNSUPPORTED_HEADS = ("logit_scale", "logits_scaling", "lm_head_multiplier", "logits_soft_cap")

# A config.json must say these: for what it leaves out transformers takes the sizes of the family's first model.
NEEDED_FIELDS = ("hidden_size", "num_hidden_layers", "vocab_size")

# Layers whose attention to a joined row, given its bounds, is that to the row alone.
JOINABLE_LAYERS = {"full_attention", "sliding_attention"}

PACKED_ATTRIBUTES = (
    *("quant_state", "blocksize", "quant_type", "bnb_quantized", "quant_storage", "module"),
    *("CB", "SCB", "has_fp16_weights"),
)
"""What bitsandbytes keeps on a 4-bit or an 8-bit parameter."""

transformers_logging.disable_progress_bar()


def read_config(directory: Path) -> PretrainedConfig:
    """The model's config.json, checked for what the training step supports.

    Raises:
        UserError: unreadable, needs code of its own, or not a supported causal language model.
    """
    try:
        config = AutoConfig.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        first = str(error).splitlines()[0]
        raise UserError(
            f"model.name: {directory}/config.json cannot be read ({first}); give a transformers model"
        ) from None
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise UserError(f"model.name: must be a causal language model; got model_type {config.model_type!r}")
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(f"model.name: must be a decoder alone; got {config.model_type}, an encoder with a decoder")
    if missing := _missing_fields(config, directory):
        raise UserError(
            f"model.name: {directory}/config.json must say {', '.join(NEEDED_FIELDS)}; missing {', '.join(missing)}; "
            "give the config.json that belongs to the model"
        )
    kind: Any = AutoModelForCausalLM._model_mapping[type(config)]
    if caps_scores(config) and not kind._supports_attention_backend:
        raise UserError(f"model.name: {config.model_type} caps attention scores in code of its own; not supported yet")
    for key in UNSUPPORTED_HEADS:
        if getattr(config, key, None) not in (None, 1, 1.0):
            raise UserError(f"model.name: {config.model_type} scales its logits ({key}), which is not supported yet")
    return config


def _missing_fields(config: PretrainedConfig, directory: Path) -> list[str]:
    """Needed fields that config.json says under none of their names; a part of a larger model may leave them out."""
    if config.get_text_config() is not config:
        return []
    said, _ = PretrainedConfig.get_config_dict(str(directory), local_files_only=True)
    aliases = config.attribute_map
    return [name for name in NEEDED_FIELDS if name not in said and aliases.get(name) not in said]


def refuse_long_rows(config: PretrainedConfig, longest: int) -> None:
    """Refuse rows that reach past the positions a model knows: it would index past a table, or guess.

    Args:
        config: the model's config.
        longest: padded tokens of the longest row.

    Raises:
        UserError: naming both numbers.
    """
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and longest > positions:
        raise UserError(
            f"data.max_length: rows must fit the model's {positions} positions (max_position_embeddings); the longest "
            f"is padded to {longest}; lower data.max_length to {positions} or less"
        )


def attention_window(config: PretrainedConfig) -> int | None:
    """Tokens that a model's sliding window spans; None for a model without one."""
    return getattr(config.get_text_config(), "sliding_window", None)


def refuse_joined_rows(config: PretrainedConfig, longest: int) -> None:
    """Refuse to join rows where a row's attention to itself is more than plain causal attention.

    Args:
        config: the model's config.
        longest: tokens of the longest row.

    Raises:
        UserError: naming what the model has, and the remedy.
    """
    text = config.get_text_config()
    kinds = sorted(set(getattr(text, "layer_types", None) or ()) - JOINABLE_LAYERS)
    if kinds:
        raise UserError(
            f"bucket.mode: packed needs attention that sees a row's bounds; {config.model_type} has layers of type "
            f"{', '.join(kinds)}; set bucket.mode=bucketed"
        )
    if caps_scores(config):
        raise UserError(
            f"bucket.mode: packed needs attention that sees a row's bounds; {config.model_type} caps its scores, which "
            "no such kernel does; set bucket.mode=bucketed"
        )
    window = attention_window(config)
    if window is not None and longest > window:
        raise UserError(
            f"bucket.mode: packed rows must fit the model's attention window of {window} tokens (sliding_window); the "
            f"longest has {longest}; lower data.max_length to {window} or set bucket.mode=bucketed"
        )


def load_model(directory: Path, spec: ModelSpec, device: torch.device) -> nn.Module:
    """A model ready for training: real weights in `spec.dtype` or NF4, adapters added, checkpointing set.

    Raises:
        UserError: weights are missing, do not fit the config, or cannot be read.
    """
    model = load_base(directory, spec, device, training_attention(read_config(directory), spec.attention))
    adapted: nn.Module = model
    if spec.adapted:
        adapted = add_adapters(model, spec, on_meta=False)
        if spec.lora_init != "default":
            start_from_weights(adapted, spec, directory)
    enable_checkpointing(model, spec)
    return adapted.train()


def load_base(
    directory: Path, spec: WeightsSpec, device: torch.device, attention: str | None = None
) -> PreTrainedModel:
    """The base alone, with real weights, read one at a time: each is converted and packed before the next is read.

    Raises:
        UserError: weights are missing, do not fit the config, or cannot be read.
    """
    config = read_config(directory)
    how = quantisation(spec)
    quantized: dict[str, Any] = {} if how is None else {"quantization_config": how}
    with warnings.catch_warnings(), loading_threads(device):
        warnings.simplefilter("ignore", FutureWarning)
        try:
            kind, own_config = _causal_kind(config)
            loaded: Any = kind.from_pretrained(
                None,
                state_dict=model_tensors(directory),
                config=own_config,
                dtype=spec.dtype,
                attn_implementation=attention or training_attention(config),
                device_map={"": device},
                output_loading_info=True,
                **quantized,
            )
        except (OSError, ValueError, KeyError, SafetensorError, RuntimeError) as error:
            first = str(error).splitlines()[0]
            raise UserError(
                f"model.name: weights in {directory} cannot be loaded ({first}); replace the files"
            ) from None
    model, info = loaded
    for fault in ("missing_keys", "mismatched_keys"):
        if info[fault]:
            raise UserError(
                f"model.name: {directory}: {len(info[fault])} {fault.replace('_', ' ')}, "
                f"first {sorted(info[fault])[0]}; the weights do not belong to config.json"
            )
    model.generation_config = _generation_config(directory)
    keep_trainable_on_cpu(model)
    return model


def _causal_kind(config: PretrainedConfig) -> tuple[Any, PretrainedConfig]:
    """The class of a causal model and the config it takes: of a model that also sees, the part for text."""
    kind = _get_model_class(config, AutoModelForCausalLM._model_mapping)
    text = config.sub_configs.get("text_config")
    return kind, config.get_text_config() if text is not None and kind.config_class == text else config


def _generation_config(directory: Path) -> GenerationConfig:
    """How the model's makers generate with it: from their file, or what config.json says of it."""
    if (directory / GENERATION_CONFIG_NAME).is_file():
        return GenerationConfig.from_pretrained(str(directory), local_files_only=True)
    return GenerationConfig.from_pretrained(
        str(directory), config_file_name=CONFIG_NAME, local_files_only=True, _from_model_config=True
    )


def fake_model(config: PretrainedConfig, spec: ModelSpec, device: torch.device) -> nn.Module:
    """The same model as `load_model` makes, on fake tensors: shapes, types and ties without storage.

    Call under an active FakeTensorMode. Built on the meta device first, because initialisers and quantisers run there.

    Raises:
        UserError: the model has no attention by scaled dot product, or train.lora.targets names no layer.
    """
    if detect_fake_mode() is None:
        raise RuntimeError("fake_model must be called under a FakeTensorMode")
    return hollow_model(config, spec, device)


def hollow_model(config: PretrainedConfig, spec: ModelSpec, device: torch.device) -> nn.Module:
    """The same model as `load_model` makes, in memory that nobody has written to: it takes no room until then.

    Raises:
        UserError: as `fake_model`.
    """
    with unset_fake_temporarily(), torch.device("meta"), init.no_init_weights():
        try:
            model = AutoModelForCausalLM.from_config(
                config, dtype=spec.dtype, attn_implementation=training_attention(config, spec.attention)
            )
        except (ValueError, KeyError) as error:
            reason = str(error).splitlines()[0].partition(". ")[0]
            raise UserError(
                f"model.name: {config.model_type} cannot be built ({reason}); choose another model"
            ) from None
        model.tie_weights()
        if quantisation(spec) is not None:
            quantize_on_meta(model, spec)
        adapted = model if spec.method == "full" else add_adapters(model, spec, on_meta=True)
    enable_checkpointing(model, spec)
    keep_trainable_on_cpu(adapted)
    _materialize(adapted, spec, device)
    return adapted.train()


def _materialize(model: nn.Module, spec: ModelSpec, device: torch.device) -> None:
    """Replace meta tensors by fake ones on `device`; a tensor shared by several modules stays shared."""
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            empty = torch.empty_like(tensor.data, device=device)
            if isinstance(tensor, nn.Parameter):
                empty = nn.Parameter(empty, tensor.requires_grad)
                # bitsandbytes reads its state off the parameter; a fake tensor cannot be one of its classes.
                for key in PACKED_ATTRIBUTES:
                    if hasattr(tensor, key):
                        setattr(empty, key, getattr(tensor, key))
            # The original is kept, or its id could be given to another tensor.
            made[id(tensor)] = (tensor, empty)
        return made[id(tensor)][1]

    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in list(tensors.items()):
                if tensor is not None and tensor.device.type == "meta":
                    tensors[name] = fake(tensor)  # type: ignore[assignment]
        state = getattr(module, "quant_state", None)
        if state is not None:
            if spec.lora_dora:
                _unpack_when_asked(module)
            state.absmax, state.code = fake(state.absmax), fake(state.code)
            if state.nested:
                state.offset = fake(state.offset)
                state.state2.absmax, state.state2.code = fake(state.state2.absmax), fake(state.state2.code)
        if isinstance(module, bnb.nn.Linear8bitLt):
            module.state.CB, module.state.SCB = module.weight.data, fake(module.state.SCB)  # type: ignore[arg-type]


def _unpack_when_asked(layer: Any) -> None:
    """Let peft unpack a fake 4-bit weight for DoRA as it does a real one.

    It knows a packed weight by the name of its class, which no fake tensor can have; a layer that unpacks itself (W_q
    marks those of another library) it asks first.
    """
    layer.W_q = True
    layer.dequantize = lambda: bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
