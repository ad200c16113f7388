"""Quantise frozen weights to 4 or 8 bits with bitsandbytes (Dettmers et al., arXiv 2305.14314 and 2208.07339)."""

import logging
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.integrations import replace_with_bnb_linear
from transformers.integrations.bitsandbytes import Bnb4bitDeserialize, Bnb8bitDeserialize
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizer_bnb_8bit import Bnb8BitHfQuantizer

from lean_finetune.config.schema import BaseWeights, Train
from lean_finetune.core.errors import UserError
from lean_finetune.core.optional_bitsandbytes import bnb, require_bitsandbytes
from lean_finetune.model.experts.experts_forward import expert_modules, expert_parameters, has_experts, is_grouped
from lean_finetune.model.experts.grouped_matmul import (
    BLOCK_WEIGHTS,
    BYTE_LEVELS,
    INT8,
    INT8_LARGEST,
    LEVELS_4BIT,
    NESTED_BLOCK_VALUES,
    pack_parameter,
    packed_modules,
    packing_of,
    register_scales,
)
from lean_finetune.model.files.quantized_checkpoint import (
    BITSANDBYTES,
    AsStored,
    stored_format,
    stored_quantisation,
    unpacked_layers,
)
from lean_finetune.model.precision import base_dtype

# bitsandbytes warns for every type but fp16 that 8-bit matmuls use fp16 inputs; docs/memory-switches.md says so too.
logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)

QUANTIZER_4BIT, QUANTIZER_8BIT = "lean_bitsandbytes_4bit", "lean_bitsandbytes_8bit"
"""Names of our quantizers for transformers."""
OUTLIER_THRESHOLD = 6.0
"""Input columns with a larger value are multiplied in 16 bits (LLM.int8(), section 3.2)."""


def quantisation(weights: BaseWeights, kept: list[str] | None = None) -> BitsAndBytesConfig | None:
    """The quantisation config of the frozen weights, without those of the layers `kept`; None without quantisation."""
    config = None
    if weights.method in ("int8_lora", "qlora"):
        require_bitsandbytes("train.method", weights.method, "train.method=lora")
    if weights.method == "int8_lora":
        config = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=OUTLIER_THRESHOLD, llm_int8_skip_modules=kept)
    elif weights.method == "qlora":
        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=weights.quant.type,
            bnb_4bit_use_double_quant=weights.quant.double,
            bnb_4bit_compute_dtype=base_dtype(weights),
            llm_int8_skip_modules=kept,
        )
    if config is not None:
        attributes: Any = config
        attributes.quant_method = QUANTIZER_8BIT if config.load_in_8bit else QUANTIZER_4BIT
    return config


def method_fault(config: PretrainedConfig, train: Train) -> str | None:
    """Why a run cannot take weights that bitsandbytes packed as they are, and what to set; None for other weights."""
    found = stored_format(config)
    if found not in BITSANDBYTES:
        return None
    method = "int8_lora" if found == INT8 else "qlora"
    wanted: dict[str, tuple[Any, Any]] = {"train.method": (train.method, method)}
    if found != INT8:
        double = bool(stored_quantisation(config).get("bnb_4bit_use_double_quant", False))
        wanted["train.quant.type"] = (train.quant.type, found.lower())
        wanted["train.quant.double"] = (train.quant.double, double)
    wanted["train.lora.init"] = (train.lora.init, "default")
    for key, (got, right) in wanted.items():
        if got != right:
            right, got = (str(value).lower() if isinstance(value, bool) else value for value in (right, got))
            return (
                f"{key}: must be {right} for a model whose files have weights in {found} of bitsandbytes; got {got}; "
                f"set it to {right}, or give the 16-bit model that they were made from"
            )
    return None


def refuse_other_method(config: PretrainedConfig, train: Train) -> None:
    """Refuse a method that cannot take the packed weights in a model's files.

    Raises:
        UserError: naming the parameter and its value.
    """
    if (fault := method_fault(config, train)) is not None:
        raise UserError(fault)


class _PackExperts:
    """Makes a bitsandbytes quantizer of transformers pack experts too, each projection as soon as it is read."""

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        """Whether a parameter is quantised while loading."""
        return _is_expert(model, param_name) or super().param_needs_quantization(model, param_name, **kwargs)  # type: ignore[misc]

    @staticmethod
    def get_modules_to_not_convert(
        model: PreTrainedModel,
        skip_modules: list[str] | None = None,
        keep_in_fp32_modules: list[str] | None = None,
        add_default_skips: bool = True,
    ) -> list[str]:
        """Modules that stay in 16 bits: the head and tied weights, also where a checkpoint names others."""
        return HfQuantizer.get_modules_to_not_convert(model, skip_modules, keep_in_fp32_modules, True)

    def get_quantize_ops(self) -> ConversionOps:
        """The operation that quantises a parameter."""
        return _Quantize(super().get_quantize_ops(), self.quantization_config)  # type: ignore[misc, attr-defined]


class _Quantize(ConversionOps):
    """Quantise a parameter that was read: experts by `pack_parameter`, others by transformers."""

    def __init__(self, of_linear: ConversionOps, config: BitsAndBytesConfig):
        self._of_linear, self._config = of_linear, config

    def convert(self, input_dict: dict[str, Any], *, model: PreTrainedModel, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The quantised parameters by name."""
        found: dict[str, Any] = {}
        for name, value in input_dict.items():
            weight = value[0] if isinstance(value, list) else value
            if isinstance(weight, AsStored):
                found[name] = _packed_parameter(model, name, weight, self._config)
                continue
            if not _is_expert(model, name):
                found.update(self._of_linear.convert({name: value}, model=model, **kwargs))
                continue
            module, _, parameter = name.rpartition(".")
            experts = model.get_submodule(module)
            kind = INT8 if self._config.load_in_8bit else self._config.bnb_4bit_quant_type
            pack_parameter(experts, parameter, weight, kind, double_quant=self._config.bnb_4bit_use_double_quant)
            found[name] = experts.get_parameter(parameter)
        return found


def _packed_parameter(model: PreTrainedModel, name: str, stored: AsStored, config: BitsAndBytesConfig) -> Any:
    """The parameter of a layer whose weight bitsandbytes packed before: what packing it here would give."""
    kind = Bnb8bitDeserialize if config.load_in_8bit else Bnb4bitDeserialize
    tensors: dict[str, Any] = dict(stored.tensors)
    parameter: Any = kind(None).convert(tensors, model=model, full_layer_name=name)["weight"]
    if isinstance(parameter, bnb.nn.Params4bit):
        parameter.data = parameter.data.view(torch.uint8).view(-1, 1)
        state = parameter.quant_state
        found = (state.blocksize, state.quant_type, state.nested, parameter.numel() * 2)
        if found[:3] != (BLOCK_WEIGHTS, config.bnb_4bit_quant_type, config.bnb_4bit_use_double_quant):
            raise ValueError(f"{name} is packed as (block, type, double) {found[:3]}, config.json says otherwise")
        state.dtype = config.bnb_4bit_compute_dtype
    return parameter


def _is_expert(model: PreTrainedModel, name: str) -> bool:
    """Whether a parameter is a projection of all experts of a layer."""
    module, _, parameter = name.rpartition(".")
    experts = model.get_submodule(module)
    return is_grouped(experts) and parameter in expert_parameters(experts)


@register_quantizer(QUANTIZER_4BIT)
class _Quantizer4Bit(_PackExperts, Bnb4BitHfQuantizer):
    """transformers' 4-bit quantizer, with experts."""


@register_quantizer(QUANTIZER_8BIT)
class _Quantizer8Bit(_PackExperts, Bnb8BitHfQuantizer):
    """transformers' 8-bit quantizer, with experts."""


def keep_trainable_on_cpu(model: nn.Module) -> None:
    """Stop bitsandbytes from repacking 4-bit weights in a no-grad forward on CPUs with AVX512-BF16.

    After the repack, training silently uses a kernel without gradients (median relative error of the adapters'
    gradients 0.95 with a normal-looking loss). Call after every load and every merge.
    """
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = False


def quantize_on_meta(model: PreTrainedModel, weights: BaseWeights) -> None:
    """Replace the linear layers of a meta model as transformers would, with hand-made states, and pack its experts.

    The same layers are skipped (head and tied weights), so shapes and bytes equal those of a quantised model.

    Raises:
        UserError: nothing can be packed.
    """
    for _, experts in expert_modules(model):
        for name in expert_parameters(experts):
            kind = INT8 if weights.method == "int8_lora" else weights.quant.type
            pack_parameter(experts, name, getattr(experts, name), kind, double_quant=weights.quant.double)
    register_scales(model)
    replace_with_bnb_linear(model, unpacked_layers(model), quantisation(weights))
    # peft chooses adapters for quantised layers by these attributes.
    attributes: Any = model
    attributes.is_loaded_in_4bit, attributes.is_loaded_in_8bit = (
        weights.method == "qlora",
        weights.method == "int8_lora",
    )
    attributes.config._is_quantized = True  # As transformers sets it: Jamba's code reads no packed weight then.
    layers = [m for m in model.modules() if isinstance(m, bnb.nn.Linear4bit | bnb.nn.Linear8bitLt)]
    if not layers and not has_experts(model):
        family = model.config.model_type
        raise UserError(f"train.method: bitsandbytes can pack no layer of {family}; got {weights.method}; use lora")
    for module in layers:
        if isinstance(module, bnb.nn.Linear4bit):
            _set_4bit_weight(module, weights)
        else:
            _set_8bit_weight(module)
        if module.bias is not None:  # The layer makes it in fp32; loading would convert it like all other weights.
            module.bias = nn.Parameter(module.bias.to(base_dtype(weights)), requires_grad=False)


def _set_4bit_weight(layer: bnb.nn.Linear4bit, weights: BaseWeights) -> None:
    """Give a meta layer the packed weight and state that quantising would make."""
    values = layer.out_features * layer.in_features
    blocks = -(-values // BLOCK_WEIGHTS)
    nested = bnb.functional.QuantState(
        absmax=_meta(-(-blocks // NESTED_BLOCK_VALUES), torch.float32),
        code=_meta(BYTE_LEVELS, torch.float32),
        blocksize=NESTED_BLOCK_VALUES,
        dtype=torch.float32,
    )
    state = bnb.functional.QuantState(
        absmax=_meta(blocks, torch.uint8 if weights.quant.double else torch.float32),
        shape=torch.Size((layer.out_features, layer.in_features)),
        dtype=base_dtype(weights),
        blocksize=BLOCK_WEIGHTS,
        code=_meta(LEVELS_4BIT, torch.float32),
        quant_type=weights.quant.type,
        offset=torch.empty((), dtype=torch.float32, device="meta") if weights.quant.double else None,
        state2=nested if weights.quant.double else None,
    )
    layer.weight = bnb.nn.Params4bit(
        torch.empty((-(-values // 2), 1), dtype=torch.uint8, device="meta"),
        requires_grad=False,
        quant_state=state,
        blocksize=BLOCK_WEIGHTS,
        compress_statistics=weights.quant.double,
        quant_type=weights.quant.type,
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
    for module in packed_modules(model):
        for name in expert_parameters(module):
            packing = packing_of(module, name)
            tensors += [] if packing is None else packing.state
    return tensors


def as_trained(stored: torch.Tensor, weights: BaseWeights, quantised: bool) -> torch.Tensor:
    """A stored weight with the rounding that it had in training, fp32."""
    weight = stored.to(base_dtype(weights))
    if not quantised:
        return weight.float()
    if weights.method == "int8_lora":
        values, scales, _ = bnb.functional.int8_vectorwise_quant(weight.half(), threshold=0.0)
        return values.float() * (scales / INT8_LARGEST)[:, None]
    packed, state = bnb.functional.quantize_4bit(
        weight, compress_statistics=weights.quant.double, quant_type=weights.quant.type
    )
    return bnb.functional.dequantize_4bit(packed, state).float()
