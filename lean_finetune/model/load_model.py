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
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.models.auto.auto_factory import _get_model_class
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME
from transformers.utils import logging as transformers_logging

from lean_finetune.core.errors import UserError
from lean_finetune.model.adapter_init import start_adapters
from lean_finetune.model.adapters import add_adapters
from lean_finetune.model.attention import training_attention
from lean_finetune.model.checkpointing import enable_checkpointing
from lean_finetune.model.empty_model import meta_model, refuse_other_heads
from lean_finetune.model.loading_threads import loading_threads
from lean_finetune.model.model_config import read_config
from lean_finetune.model.model_spec import ModelSpec, WeightsSpec
from lean_finetune.model.quantize import keep_trainable_on_cpu, quantisation, quantize_on_meta
from lean_finetune.model.safetensors_files import model_tensors

PACKED_ATTRIBUTES = (
    *("quant_state", "blocksize", "quant_type", "bnb_quantized", "quant_storage", "module"),
    *("CB", "SCB", "has_fp16_weights"),
)
"""What bitsandbytes keeps on a 4-bit or an 8-bit parameter."""

transformers_logging.disable_progress_bar()


def load_model(directory: Path, spec: ModelSpec, device: torch.device) -> nn.Module:
    """A model ready for training: real weights in `spec.dtype` or NF4, adapters added, checkpointing set.

    Raises:
        UserError: weights are missing, do not fit the config, or cannot be read.
    """
    model = load_base(directory, spec, device, training_attention(read_config(directory), spec.attention))
    adapted: nn.Module = model
    if spec.adapted:
        adapted = add_adapters(model, spec, on_meta=False)
        start_adapters(adapted, spec, directory)
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
    refuse_other_heads(model)
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
    return uninitialized_model(config, spec, device)


def uninitialized_model(config: PretrainedConfig, spec: ModelSpec, device: torch.device) -> nn.Module:
    """The same model as `load_model` makes, in memory that nobody has written to: it takes no room until then.

    Raises:
        UserError: as `fake_model`.
    """
    model = meta_model(config, dtype=spec.dtype, attn_implementation=training_attention(config, spec.attention))
    with unset_fake_temporarily(), torch.device("meta"), init.no_init_weights():
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
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
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
