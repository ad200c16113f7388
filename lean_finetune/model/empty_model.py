"""Models without weights: the language part of a multimodal model, and reward models."""

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers import initialization as init
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.masking_utils import create_bidirectional_mask
from transformers.models.auto.auto_factory import _get_model_class
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nModel
from transformers.models.llama4.modeling_llama4 import Llama4PreTrainedModel

from lean_finetune.core.errors import UserError
from lean_finetune.model.beside.parts import WholeModel, kept_parts, parts_beside_text
from lean_finetune.model.beside.whole_config import is_whole
from lean_finetune.model.experts.experts_forward import EXPERTS_OPTION, Llama4
from lean_finetune.model.files.safetensors_files import FileTensor
from lean_finetune.model.recurrent.packed_layers import OF_PACKED_ROWS
from lean_finetune.model.recurrent.selective_scan import selective_scan
from lean_finetune.patches import of_models

# The language model inside a multimodal checkpoint: the full model's class without its other parts.
#
# The model is built by the family's own class, and every part that text never reaches is then left out. So parameters
# have the names of the full model, an adapter loads into it, and a saved model only lacks the tensors of those parts,
# which are copied from the original files.


class LanguagePart:
    """Mixed into the class of a multimodal model: leaves out all parts but the decoder and its head."""

    left_out: dict[str, int]
    """Parameters of each part that is left out, by the part's name; 0 if they are unknown."""

    def __init__(self, config: PretrainedConfig, *args: Any, **kwargs: Any):
        with of_models.TIMM_WITHOUT_LAYERS.during(PreTrainedModel.__init__):
            super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        self.left_out = dict(_leave_out(self))  # type: ignore[arg-type]
        known = getattr(self, "_keys_to_ignore_on_load_unexpected", None) or ()
        self._keys_to_ignore_on_load_unexpected = {*known, *(f"^{re.escape(part)}" for part in self.left_out)}
        for module in self.modules():  # type: ignore[attr-defined]
            if type(module) is Gemma3nModel:
                of_models.GEMMA3N_OF_TEXT.give_class(module, _Gemma3nOfText)


class _Gemma3nOfText(Gemma3nModel):
    """Gemma 3n's model, which otherwise embeds every token as one of its encoders too."""

    def forward(self, input_ids: torch.Tensor | None = None, **arguments: Any) -> Any:
        if input_ids is not None:
            arguments["inputs_embeds"] = self.get_input_embeddings()(input_ids)
            arguments["per_layer_inputs"] = self.language_model.get_per_layer_inputs(input_ids)
        return super().forward(**arguments)


def is_multimodal(config: PretrainedConfig) -> bool:
    """Whether transformers has a class for this config that takes more than text."""
    return type(config) in AutoModelForMultimodalLM._model_mapping


def _leave_out(model: PreTrainedModel) -> Iterator[tuple[str, int]]:
    """Remove the parts that text never reaches; yield their names and numbers of parameters."""
    for owner, name, full_name, part in list(parts_beside_text(model)):
        setattr(owner, name, None)
        yield full_name, _size(part)
    decoder = model.get_decoder()
    if decoder is None or model.get_output_embeddings() not in decoder.modules():
        yield from _leave_out_nested(model)


def _leave_out_nested(model: PreTrainedModel) -> Iterator[tuple[str, int]]:
    """Remove embeddings beside those of tokens inside the decoder (Phi-4): the modules that own an encoder."""
    decoder = model.get_decoder()
    base = next(name for name, module in model.named_modules() if module is decoder)
    encoders = [name for name, module in decoder.named_modules() if name and isinstance(module, PreTrainedModel)]
    for path in sorted({name.rpartition(".")[0] for name in encoders} - {""}):
        parent, _, name = path.rpartition(".")
        owner = decoder.get_submodule(parent)
        yield f"{base}.{path}", _size(getattr(owner, name))
        setattr(owner, name, None)


def _size(part: nn.Module | nn.Parameter) -> int:
    """Number of parameters."""
    return part.numel() if isinstance(part, nn.Parameter) else sum(parameter.numel() for parameter in part.parameters())


def left_out(model: nn.Module) -> dict[str, int]:
    """Parameters of the parts that a model lacks, by name; empty if it is complete."""
    return getattr(model, "left_out", {})


def left_out_text(model: nn.Module) -> str | None:
    """The parts that a model lacks, for people; None if it is complete."""
    sizes = {name: f"{count:,} parameters" if count else "a model of timm" for name, count in left_out(model).items()}
    parts = ", ".join(f"{name} ({size})" for name, size in sizes.items())
    return f"{parts}: the rows do not train them" if parts else None


def pattern_of(parts: Iterable[str]) -> str | None:
    """A regular expression for the names of all modules in these parts, as peft matches them; None without parts."""
    names = "|".join(re.escape(part) for part in sorted(parts))
    return rf"({names})(\..*)?" if names else None


def names_in_model(model: PreTrainedModel, stored: Iterable[str]) -> dict[str, str]:
    """The model's name of each tensor in its files, as transformers renames it while loading."""
    return {key: name for key, (name, _, _) in conversions_in_model(model, stored).items()}


def conversions_in_model(
    model: PreTrainedModel, stored: Iterable[str]
) -> dict[str, tuple[str, str | None, WeightConverter | None]]:
    """What transformers makes of each tensor in a model's files: its name, the pattern that it matches, the operation.

    The last two are None for a tensor that is taken as it is.
    """
    conversions = getattr(model, "_weight_conversions", None) or get_model_conversion_mapping(model)
    renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    prefix, known = model.base_model_prefix, model.state_dict()
    renamed = {key: rename_source_key(key, renamings, converters, prefix, known) for key in stored}
    return {key: (name, pattern, by_pattern.get(pattern or "")) for key, (name, pattern) in renamed.items()}


def stored_left_out(model: PreTrainedModel, stored: Mapping[str, FileTensor]) -> dict[str, FileTensor]:
    """The tensors in a complete model's files, `stored`, that its language part lacks."""
    if not left_out(model):
        return {}
    known = model.state_dict()
    return {name: stored[name] for name, own in names_in_model(model, stored).items() if own not in known}


# Build models without weights from their config.


def full_or_mask(
    config: PretrainedConfig, inputs_embeds: torch.Tensor, attention_mask: torch.Tensor | None, **more: Any
) -> Any:
    """Transformers' mask for attention in both directions, as in encoders; none where nothing is hidden.

    `attention_mask` is (B, T). transformers looks at its values too, but not in a trace, which would then count a mask
    that does not exist.
    """
    if attention_mask is not None and attention_mask.dim() == 2 and bool(attention_mask.all()):
        attention_mask = None
    return create_bidirectional_mask(config, inputs_embeds, attention_mask, **more)


REPLACEMENTS: Mapping[str, Callable[[Any], Any]] = {
    "mamba_selective_scan": lambda _: selective_scan,
    "FalconLinear": lambda _: nn.Linear,
    "create_bidirectional_mask": lambda _: full_or_mask,
    **OF_PACKED_ROWS,
}
"""What families' code uses in place of its own functions and classes, by their names there."""


def meta_model(config: PretrainedConfig, **options: object) -> PreTrainedModel:
    """A causal language model on the meta device: shapes, types and ties without memory.

    Args:
        config: its config, of which the model has a copy.
        options: arguments of transformers' `from_config`, such as dtype and attention.

    Raises:
        UserError: transformers cannot build a model from these values, or does not support `options`.
    """
    kind, own_config = causal_kind(config)
    options = {**EXPERTS_OPTION, **options}
    with unset_fake_temporarily(), torch.device("meta"), init.no_init_weights():
        try:
            model: PreTrainedModel = kind._from_config(copy.deepcopy(own_config), **options)
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


# Reward models: transformers' sequence classifiers with one output, which is the score of a row at its last token.

SCORE = "score"
"""Name of the head in the decoders that transformers has classifiers of."""
USUAL_RANGE = 0.02
"""Standard deviation of a new head's weights where a config names none; transformers' own."""


class ScoredModel:
    """Mixed into a family's classifier: its head is the model's output layer."""

    def get_output_embeddings(self) -> nn.Module:
        """The head."""
        return self.score

    def set_output_embeddings(self, head: nn.Module) -> None:
        """Set the head; called where tokens are added."""
        self.score = head

    def _get_resized_lm_head(self, head: nn.Module, *_: Any, **__: Any) -> nn.Module:
        """The head as it is: it has no output for a new token."""
        return head


def token_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The layers with a row for each token: the embedding, and the head of a language model."""
    head = None if isinstance(model, ScoredModel) else model.get_output_embeddings()
    return [layer for layer in (model.get_input_embeddings(), head) if layer is not None]


def language_head(config: PretrainedConfig) -> str:
    """The name of the language model's head, for the config of a reward model too."""
    plain = copy.copy(config)
    plain.architectures = None
    model = meta_model(plain)
    return next(name for name, module in model.named_modules() if module is model.get_output_embeddings())


def scoring_config(config: PretrainedConfig) -> PretrainedConfig:
    """The config of a reward model of the family.

    Raises:
        UserError: transformers has no classifier of the family, or one with other parts.
    """
    kind = _classifier(config)
    if kind is None:
        raise UserError(
            f"train.objective: transformers has no AutoModelForSequenceClassification of {config.model_type}; got "
            "reward; choose another model"
        )
    config = copy.deepcopy(config)
    config.architectures, config.num_labels = [kind.__name__], 1
    return config


def scoring_class(config: PretrainedConfig) -> Any:
    """The class of the reward model of a config; None for the config of a language model."""
    kind = _classifier(config)
    return kind if kind is not None and config.architectures == [kind.__name__] else None


def _classifier(config: PretrainedConfig) -> Any:
    return AutoModelForSequenceClassification._model_mapping.get(type(config), None)


def start_score(model: PreTrainedModel, seed: int) -> None:
    """Draw the weights of a head that the base's files lack, as transformers does; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    weight: torch.Tensor = model.get_output_embeddings().weight
    deviation = getattr(model.config.get_text_config(), "initializer_range", None) or USUAL_RANGE
    with torch.no_grad():
        weight.copy_(torch.randn(weight.shape, generator=generator) * deviation)


def causal_class(config: PretrainedConfig) -> Any:
    """The class of a config's language model or reward model; of a multimodal one with the parts that it needs."""
    if (scoring := scoring_class(config)) is not None:
        of_models.use_in_family(scoring, REPLACEMENTS)
        return _subclass(scoring, (ScoredModel,))
    multimodal = is_multimodal(config)
    kind = _get_model_class(config, (AutoModelForMultimodalLM if multimodal else AutoModelForCausalLM)._model_mapping)
    of_models.use_in_family(kind, REPLACEMENTS)
    parts = WholeModel if is_whole(config) else LanguagePart
    ours = (parts,) * multimodal + (Llama4,) * issubclass(kind, Llama4PreTrainedModel)
    return _subclass(kind, ours) if ours else kind


@cache
def _subclass(kind: type[PreTrainedModel], ours: tuple[type, ...]) -> Any:
    """A subclass under the same name and module, by which transformers finds a family's conversions and its loss."""
    return type(kind.__name__, (*ours, kind), {"__module__": kind.__module__, "__doc__": ours[0].__doc__})


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
    beside = kept_parts(model)
    seen = {id(parameter) for part in parts for parameter in part.parameters()}
    between = sorted(
        name
        for name, parameter in model.named_parameters()
        if id(parameter) not in seen and not (beside and name.startswith(beside))
    )
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


def decoder_layers(lm: PreTrainedModel) -> nn.ModuleList | None:
    """A model's list of layers; None unless exactly one list has as many entries as the model has layers."""
    count = lm.config.get_text_config().num_hidden_layers
    lists = [m for m in lm.get_decoder().children() if isinstance(m, nn.ModuleList) and len(m) == count]
    return lists[0] if len(lists) == 1 else None
