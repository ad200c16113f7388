"""Read a model's config, and what it says about rows, layers and attention."""

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, PretrainedConfig
from transformers.activations import ACT2CLS

from lean_finetune.config.model_families import NEEDS_MASK, family_of
from lean_finetune.core.errors import UserError, shortened
from lean_finetune.islands.tower import TOWER
from lean_finetune.model.beside.whole_config import is_whole, whole_config
from lean_finetune.model.empty_model import causal_class, is_multimodal, scoring_config
from lean_finetune.model.files.quantized_checkpoint import unsupported_format
from lean_finetune.model.files.safetensors_files import stored_names
from lean_finetune.model.recurrent.packed_layers import DELTA_RULE_CHUNK
from lean_finetune.pinning.config_file import read_config_json

SIZES = ("hidden_size", "intermediate_size", "ffn_dim", "num_hidden_layers", "num_attention_heads", "vocab_size")
"""Sizes that config.json must have if its family has them: transformers replaces missing ones by those of the family's
first model."""

WIDTHS = ("hidden_size", "intermediate_size", "ffn_dim")
"""Columns of weights: bitsandbytes takes a weight of one column for a packed one."""

INDEXED = "indexed_attention"
"""Type of the layers with an index of tokens: DeepSeek-V3.2, GLM-5 and others."""

# Layer types whose attention we can restrict to each packed row.
JOINABLE_LAYERS = {"full_attention", "sliding_attention"}

UNREADABLE = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    ArithmeticError,
    StrictDataclassError,
    ImportError,
)
"""Exceptions of transformers for a faulty config.json."""


def read_config(directory: Path, *, scores: bool = False, whole: bool = False) -> PretrainedConfig:
    """The model's config, checked against what the training step supports.

    With `scores` that of a reward model, with `whole` that of a model with its parts beside decoder and head.

    Raises:
        UserError: it is unreadable, needs remote code, or is not a supported causal language model; or transformers
            has no reward model of its family.
    """
    config = _parsed(directory)
    if fault := next(_faults(config, directory), None):
        raise UserError(f"model.name: {fault}")
    if whole:
        TOWER.refuse_family(config.model_type)
        return whole_config(config)
    if not scores:
        return config
    if is_multimodal(config):
        raise UserError(
            f"train.objective: a reward model of {config.model_type}, which also takes images or sound, was not tried; "
            "got reward; choose another model"
        )
    return scoring_config(config)


def _parsed(directory: Path) -> PretrainedConfig:
    """Read config.json with transformers, once its values are known to be of a model's size."""
    given = read_config_json(directory)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )
    except UNREADABLE as error:
        cause = error.__cause__ if isinstance(error, StrictDataclassError) else error
        first = shortened((str(cause).strip() or type(cause).__name__).splitlines()[0].partition(". ")[0], 240)
        if "trust_remote_code" in str(cause):
            raise UserError(
                f"model.name: {directory} needs code of its own (auto_map in config.json), which is never executed; "
                "choose a model whose code is in transformers"
            ) from None
        raise UserError(
            f"model.name: {directory}/config.json cannot be read ({first}); give a transformers model"
        ) from None
    if family_of(config.model_type).ties_by_default and "tie_word_embeddings" not in given:
        names = stored_names(directory)
        has_head = any(name.endswith("lm_head.weight") for name in names)
        config.tie_word_embeddings = not has_head if names else config.get_text_config().tie_word_embeddings
    return config


def _faults(config: PretrainedConfig, directory: Path) -> Iterator[str]:
    """What the training step does not support; later checks may assume that earlier ones passed."""
    name, file = config.model_type, f"{directory}/config.json"
    of_text = type(config) in AutoModelForCausalLM._model_mapping or is_multimodal(config)
    not_causal = f"must be a causal language model; got model_type {name!r}"
    if not of_text:
        yield not_causal
    if getattr(config, "is_encoder_decoder", False):  # Of both, get_text_config finds none.
        yield f"must be a decoder alone; got {name}, an encoder with a decoder"
    if (reason := family_of(name).unsupported) is not None:
        yield f"{name} {reason}; choose another model"
    if not hasattr(config.get_text_config(), "num_hidden_layers"):
        yield not_causal
    if getattr(config, "is_decoder", True) is False and type(config) in AutoModelForMaskedLM._model_mapping:
        yield f"must be a decoder; {name} attends to later tokens as well, as {file} does not say is_decoder"
    if (unsupported := unsupported_format(config)) is not None:
        yield f"{directory} {unsupported}"
    if missing := _missing_sizes(config, directory):
        yield (
            f"{file} must have the model's sizes; missing {', '.join(missing)}; give the config.json that belongs to "
            "the model"
        )
    if wrong := _impossible_size(config):
        yield f"{file}: {wrong}; give the config.json that belongs to the model"
    if INDEXED in other_layers(config):
        yield f"{name} chooses the tokens to attend to with {NEEDS_MASK}; choose another model"
    if (rope := _dynamic_rope(config)) is not None:
        usual = {"alpha", "original_max_position_embeddings"}.isdisjoint(rope)
        same = "remove rope_scaling there: rows of up to max_position_embeddings tokens stay the same"
        yield (
            f"{file}: rope_scaling must not be dynamic, which reads positions in each step, so that its memory is not "
            f"known; {same if usual else 'choose another model'}"
        )
    if caps_scores(config) and not causal_class(config)._supports_attention_backend:
        yield f"{name} caps attention scores in its own attention code, which is not supported yet"


def _missing_sizes(config: PretrainedConfig, directory: Path) -> list[str]:
    """Sizes that config.json does not have under any name; the text part of a larger model may omit them."""
    if config.get_text_config() is not config:
        return []
    given, _ = PretrainedConfig.get_config_dict(str(directory), local_files_only=True)
    of_family = {field.name: field.default for field in fields(config)}
    names = {size: config.attribute_map.get(size, size) for size in SIZES}
    return [
        size for size, name in names.items() if isinstance(of_family.get(name), int) and not {size, name} & {*given}
    ]


def _impossible_size(config: PretrainedConfig) -> str | None:
    """The first impossible size; transformers finds some of these in the first step, and a trace finds none."""
    for size in (*SIZES, "num_key_value_heads", "head_dim"):
        for value in layer_settings(config, size):
            least = 2 if size in WIDTHS else 1
            if isinstance(value, int) and value < least:
                return f"{size} must be at least {least}; got {value}"
    for key in ("hidden_act", "hidden_activation", "activation_function"):
        for value in layer_settings(config, key):
            if isinstance(value, str) and value not in ACT2CLS:
                return f"{key} must be an activation function of transformers; got {value!r}"
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    if not isinstance(rope.get("rope_theta", 1.0), int | float | dict):
        return f"rope_theta must be a number; got {rope['rope_theta']!r}"
    counts = (layer_settings(config, name) for name in ("num_attention_heads", "num_key_value_heads"))
    for heads, groups in zip(*counts, strict=True):
        if isinstance(heads, int) and isinstance(groups, int) and heads % groups:
            return f"num_attention_heads must be a multiple of num_key_value_heads; got {heads} and {groups}"
    return None


def _dynamic_rope(config: PretrainedConfig) -> dict[str, Any] | None:
    """Rotary embeddings that change with the longest row; families with several types of layers have one for each."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    each = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    return next((part for part in each if "dynamic" in str(part.get("rope_type"))), None)


def layer_settings(config: PretrainedConfig, name: str) -> list[Any]:
    """A config value: per layer if layers differ (as in Gemma 4), else one; None if it does not exist.

    A config whose layers differ raises on access to a single value.
    """
    text = config.get_text_config()
    each: list[PretrainedConfig] = [text]
    if getattr(text, "is_heterogeneous", False):
        each = list(text.per_layer_config)
    return [getattr(layer, name, None) for layer in each]


def caps_scores(config: PretrainedConfig) -> bool:
    """Whether a model caps its attention scores, so that all of them must exist."""
    return getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None


def computes_own_attention(config: PretrainedConfig) -> bool:
    """Whether a family's own code computes attention, with all length × length scores, as Falcon's does."""
    kind = causal_class(config)
    own = family_of(config.model_type).own_attention or not kind._supports_sdpa
    return own and not kind._supports_attention_backend


def has_sinks(config: PretrainedConfig) -> bool:
    """Whether transformers says that PyTorch's sdpa cannot compute a model's attention, though fused kernels can."""
    kind = causal_class(config)
    return kind._supports_attention_backend and not kind._supports_sdpa


def has_attention(config: PretrainedConfig) -> bool:
    """Whether any layer has attention; those of Mamba have none."""
    return None not in layer_settings(config, "num_attention_heads")


def largest_head_size(config: PretrainedConfig) -> int:
    """The largest attention head size of any layer; 0 without attention."""
    if not has_attention(config):
        return 0
    names = ("head_dim", "hidden_size", "num_attention_heads")
    settings = zip(*(layer_settings(config, name) for name in names), strict=True)
    return max(head or hidden // heads for head, hidden, heads in settings)


def max_positions(config: PretrainedConfig) -> int | None:
    """Tokens of the longest row that a model takes; None without a limit."""
    limit: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return limit


def ties_embedding(config: PretrainedConfig) -> bool:
    """Whether embedding and head share their weights; where the text part leaves it out, the whole config says so."""
    own = getattr(config, "tie_word_embeddings", False)
    return bool(getattr(config.get_text_config(), "tie_word_embeddings", own))


def attention_window(config: PretrainedConfig) -> int | None:
    """Tokens of a model's sliding window, or of its chunks of attention (Llama 4); None without one."""
    found = (window for name in ("sliding_window", "attention_chunk_size") for window in layer_settings(config, name))
    return min((window for window in found if window), default=None)  # Qwen2-MoE without one: 0.


def other_layers(config: PretrainedConfig) -> list[str]:
    """Types of a model's layers other than those with plain attention: Mamba, convolutions and others."""
    return sorted(set(getattr(config.get_text_config(), "layer_types", None) or ()) - JOINABLE_LAYERS)


def chunk_tokens(config: PretrainedConfig) -> int:
    """Tokens of a row that layers without attention compute at once, to which they pad rows; 0 without such layers."""
    if not other_layers(config):
        return 0
    text = config.get_text_config()
    sizes = (getattr(text, name, None) for name in ("mamba_chunk_size", "chunk_size"))
    return next((size for size in sizes if isinstance(size, int) and size > 0), DELTA_RULE_CHUNK)


def row_loop(config: PretrainedConfig) -> Literal["none", "parts", "tokens"]:
    """What of a row the model's code loops over, so that a trace takes time with the row's length."""
    if family_of(config.model_type).loops_over_tokens:
        return "tokens"
    return "parts" if other_layers(config) or hasattr(config.get_text_config(), "chunk_size") else "none"


# Refuse rows that a model cannot take: too long, packed, or context parallel.

UNPACKED = "set bucket.mode=bucketed, or choose another model"
"""Remedy for families that do not support packed rows."""


def refuse_long_rows(config: PretrainedConfig, longest: int) -> None:
    """Refuse rows longer than the model's position embeddings.

    Args:
        config: the model's config.
        longest: padded tokens of the longest row.

    Raises:
        UserError: naming both numbers.
    """
    limit = max_positions(config)
    if limit is not None and longest > limit:
        raise UserError(
            f"data.max_length: rows must fit the model's {limit} positions (max_position_embeddings); the longest is "
            f"padded to {longest}; lower data.max_length to {limit} or less"
        )


class RowsSeeEachOther(UserError):
    """Packed rows of this family do."""


def rows_see_each_other(name: str) -> RowsSeeEachOther:
    """The refusal of packed rows in a family."""
    return RowsSeeEachOther(f"bucket.mode: packed needs rows that do not see each other; in {name} they do; {UNPACKED}")


def tokens_seen_outside_attention(name: str) -> UserError:
    """The refusal of context parallelism in a family."""
    return UserError(
        "train.context_parallel: needs a model whose tokens see each other in attention alone, at positions that it is "
        f"given; {name} does not work so; set train.context_parallel=1"
    )


def refuse_context_parallel(config: PretrainedConfig, parts: int) -> None:
    """Refuse context parallelism over `parts` processes if attention cannot be split by heads.

    Raises:
        UserError: naming what the model has, and the remedy.
    """
    if parts == 1:
        return
    if not has_attention(config) or row_loop(config) != "none" or computes_own_attention(config):
        raise tokens_seen_outside_attention(config.model_type)
    for heads in layer_settings(config, "num_attention_heads"):
        if heads % parts:
            raise UserError(
                "train.context_parallel: must divide the model's attention heads, of which each GPU computes a part; "
                f"got {parts} for {heads}; set it to a divisor"
            )


def refuse_packed_rows(config: PretrainedConfig, longest: int) -> None:
    """Refuse to pack rows if attention within a row is more than plain causal attention.

    Args:
        config: the model's config.
        longest: tokens of the longest row.

    Raises:
        UserError: naming what the model has, and the remedy.
    """
    if is_whole(config):
        raise UserError(f"bucket.mode: {TOWER.unpackable}; got packed; set bucket.mode=bucketed")
    packs_other_layers = family_of(config.model_type).packs_other_layers
    if (kinds := other_layers(config)) and not packs_other_layers:
        raise UserError(
            f"bucket.mode: packed needs attention that sees a row's bounds; {config.model_type} has layers of type "
            f"{', '.join(kinds)}; set bucket.mode=bucketed"
        )
    if not packs_other_layers and computes_own_attention(config):  # A token would see earlier rows.
        raise rows_see_each_other(config.model_type)
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
