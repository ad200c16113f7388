"""Build models without weights from their config."""

import re
import sys
from functools import cache
from inspect import isfunction
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, PretrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.integrations import hub_kernels
from transformers.models.auto.auto_factory import _get_model_class
from transformers.models.llama4.modeling_llama4 import Llama4PreTrainedModel

from lean_finetune.core.errors import UserError
from lean_finetune.model.experts.experts_forward import Llama4, experts_option
from lean_finetune.model.language_part import LanguagePart, is_multimodal
from lean_finetune.model.selective_scan import selective_scan

REPLACED = {"mamba_selective_scan": selective_scan, "FalconLinear": nn.Linear}
"""What families' code uses in place of its own, by its name there: bitsandbytes packs no layers of Falcon's class."""


def meta_model(config: PretrainedConfig, **options: object) -> PreTrainedModel:
    """A causal language model on the meta device: shapes, types and ties without memory.

    Args:
        config: its config.
        options: arguments of transformers' `from_config`, such as dtype and attention.

    Raises:
        UserError: transformers cannot build a model from these values, or does not support `options`.
    """
    kind, own_config = causal_kind(config)
    options = {**experts_option(kind), **options}
    with unset_fake_temporarily(), torch.device("meta"), init.no_init_weights():
        try:
            model: PreTrainedModel = kind._from_config(own_config, **options)
        except Exception as error:  # A model's code may raise anything for unexpected values.
            raise UserError(
                f"model.name: {config.model_type} cannot be built ({_reason(error, options)}); choose another model, "
                "or give the config.json that belongs to this one"
            ) from None
        model.tie_weights()
    refuse_other_heads(model)
    return model


def kept_in_fp32(model: PreTrainedModel, dtype: torch.dtype) -> set[str]:
    """Names of the parameters and buffers that a family loads in fp32 where the others are of this type."""
    of_fp16 = model._keep_in_fp32_modules if dtype == torch.float16 else None
    of_16_bits = model._keep_in_fp32_modules_strict if dtype in (torch.float16, torch.bfloat16) else None
    patterns = [pattern.replace("*", ".*") for pattern in (*(of_fp16 or ()), *(of_16_bits or ()))]
    names = [name for tensors in (model.named_parameters(), model.named_buffers()) for name, _ in tensors]
    return {name for name in names if any(re.search(pattern, name) for pattern in patterns)}


def keep_in_fp32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Give a meta model's tensors that a family loads in fp32 that type, such as DeepSeek's bias of the routers."""
    for name in kept_in_fp32(model, dtype):
        path, _, last = name.rpartition(".")
        module = model.get_submodule(path)
        if last in module._buffers:
            module._buffers[last] = module.get_buffer(last).float()
        else:
            parameter = module.get_parameter(last)
            module._parameters[last] = nn.Parameter(parameter.float(), parameter.requires_grad)


def causal_class(config: PretrainedConfig) -> Any:
    """The class of the causal language model of a config; of a multimodal one without its other parts."""
    multimodal = is_multimodal(config)
    kind = _get_model_class(config, (AutoModelForMultimodalLM if multimodal else AutoModelForCausalLM)._model_mapping)
    replace_code(kind)
    ours = (LanguagePart,) * multimodal + (Llama4,) * issubclass(kind, Llama4PreTrainedModel)
    return _subclass(kind, ours) if ours else kind


@cache
def _subclass(kind: type[PreTrainedModel], ours: tuple[type, ...]) -> Any:
    """A subclass under the same name and module, by which transformers finds a family's conversions and its loss."""
    return type(kind.__name__, (*ours, kind), {"__module__": kind.__module__, "__doc__": ours[0].__doc__})


def replace_code(kind: type) -> None:
    """Make the code of a family of models use `REPLACED`, and no kernels of other packages.

    transformers calls those of mamba-ssm, causal-conv1d and flash-linear-attention where they are installed. They
    cannot be traced, and they take other memory.
    """
    for name in {base.__module__ for base in kind.__mro__ if base.__module__.startswith("transformers.models.")}:
        code = sys.modules[name]
        for key, value in list(vars(code).items()):
            if key in REPLACED:
                setattr(code, key, REPLACED[key])
            elif isfunction(value) and value.__code__.co_filename == hub_kernels.__file__:
                setattr(code, key, getattr(value, "__wrapped__", value))


def causal_kind(config: PretrainedConfig) -> tuple[Any, PretrainedConfig]:
    """The class of a causal language model, and its config: for some classes the text part of `config`."""
    kind = causal_class(config)
    text = config.sub_configs.get("text_config")
    return kind, config.get_text_config() if text is not None and kind.config_class == text else config


def refuse_other_heads(model: PreTrainedModel) -> None:
    """Refuse models whose logits are more than the head applied to the decoder's output, as the loss assumes.

    Raises:
        UserError: naming the parameter between decoder and head.
    """
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    parts = [part for part in (decoder, head) if part is not None]
    seen = {id(parameter) for part in parts for parameter in part.parameters()}
    between = sorted(name for name, parameter in model.named_parameters() if id(parameter) not in seen)
    name = model.config.model_type
    if head is None or decoder is None or head in decoder.modules():
        raise UserError(f"model.name: {name} has no decoder apart from its head; choose another model")
    if not hasattr(model.get_input_embeddings(), "weight"):
        raise UserError(f"model.name: {name} embeds tokens by code of its family alone; choose another model")
    if between:
        raise UserError(
            f"model.name: {name} has {between[0]} outside of its decoder and its head, which the loss would ignore; "
            "choose another model"
        )


def _reason(error: Exception, options: dict[str, object]) -> str:
    """Why a model cannot be built, in a few words."""
    if isinstance(error, KeyError) and error.args[0] in options.values():
        return f"its code knows no {error}"
    first = next(iter(str(error).strip().splitlines()), "").partition(". ")[0]
    return first if isinstance(error, ValueError) and first else f"{type(error).__name__}: {first}"
