"""What the library knows of families of models beyond their config and transformers' code, by `model_type`.

A family that is not listed is of the usual kind.
"""

from collections.abc import Mapping
from dataclasses import dataclass

NEEDS_MASK = "a mask of all pairs of tokens, which training does not create"


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """The facts of a family; the defaults are the usual case."""

    unsupported: str | None = None
    """Why training would fail; its models are refused."""
    ties_by_default: bool = False
    """Its config ties embedding and head if config.json does not say it, though most of its models have a head of their
    own (transformers #42313). The weights decide then, or else the text part."""
    own_attention: bool = False
    """It supports transformers' own attention functions alone, by name."""
    packs_other_layers: bool = False
    """Its layers without attention pass the bounds of packed rows on to all functions that mix tokens."""
    loops_over_tokens: bool = False
    """Its code computes one token after the other."""
    read_directly: frozenset[str] = frozenset()
    """Layers whose weight its code reads without calling the layer, so that an adapter would have no effect."""
    read_unpacked: tuple[str, ...] = ()
    """Layers whose weight its code multiplies by or limits itself, which a packed one does not allow."""
    stored_in_mxfp4: bool = False
    """transformers reads its files in MXFP4."""
    multiplies_logits: bool = False
    """It multiplies its logits by what other families divide them by."""
    code_of_llama: bool = False
    """Llama's code in layers, norms, MLP and rotary embedding (train.fused_kernels: liger)."""
    gated_delta_rule: bool = False
    """Its linear attention is a gated delta rule with one decay for each head (train.fused_kernels: fla)."""


USUAL = ModelFamily()
_PACKED = ModelFamily(packs_other_layers=True)
_LLAMA = ModelFamily(code_of_llama=True)
_DELTA_RULE = ModelFamily(packs_other_layers=True, gated_delta_rule=True)
_READS_OUTPUT = ModelFamily(packs_other_layers=True, read_directly=frozenset({"out_proj"}))

MODEL_FAMILIES: Mapping[str, ModelFamily] = {
    "bailing_hybrid": _PACKED,
    "bamba": _PACKED,
    "biogpt": ModelFamily(
        unsupported="makes a mask that it leaves out where all values allow it, so its memory is not known"
    ),
    "blt": ModelFamily(unsupported="reads bytes in patches whose number depends on the text"),
    "cpmant": ModelFamily(unsupported="lets a token see later ones"),
    "deepseek_v4": ModelFamily(unsupported="attends to summaries of earlier tokens too, which is not supported yet"),
    "doge": ModelFamily(unsupported=f"attends with {NEEDS_MASK}"),
    "falcon": ModelFamily(own_attention=True),
    "falcon_h1": _READS_OUTPUT,
    "falcon_mamba": ModelFamily(read_directly=frozenset({"dt_proj", "out_proj"})),
    "gemma3n_text": ModelFamily(
        read_directly=frozenset({"correction_coefs"}), read_unpacked=("prediction_coefs", "correction_coefs")
    ),
    "gpt_oss": ModelFamily(stored_in_mxfp4=True),
    "granitemoehybrid": _PACKED,
    "hyperclovax": ModelFamily(multiplies_logits=True),
    "internvl": ModelFamily(ties_by_default=True),
    "jamba": ModelFamily(read_directly=frozenset({"dt_proj"})),
    "kimi_linear": _PACKED,
    "lfm2": _PACKED,
    "lfm2_moe": _PACKED,
    "lfm3": _PACKED,
    "llama": _LLAMA,
    "mamba": ModelFamily(read_directly=frozenset({"dt_proj", "out_proj"}), read_unpacked=("dt_proj",)),
    "mamba2": _READS_OUTPUT,
    "ministral": _LLAMA,
    "mistral": _LLAMA,
    "mistral3": ModelFamily(ties_by_default=True),
    "mpt": ModelFamily(
        unsupported="has names of its own for the limit of rows and for a scale of logits that is not applied"
    ),
    "nemotron_h": _READS_OUTPUT,
    "olmo_hybrid": _DELTA_RULE,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "qwen3_5": _DELTA_RULE,
    "qwen3_5_moe": _DELTA_RULE,
    "qwen3_5_moe_text": _DELTA_RULE,
    "qwen3_5_text": _DELTA_RULE,
    "qwen3_next": _DELTA_RULE,
    "recurrent_gemma": ModelFamily(loops_over_tokens=True),
    "rwkv": ModelFamily(
        unsupported="computes one token after the other, except by a kernel from the hub, and changes its weights to "
        "evaluate"
    ),
    "smollm3": _LLAMA,
    "zamba2": _PACKED,
}


def family_of(model_type: str) -> ModelFamily:
    """The facts of a family."""
    return MODEL_FAMILIES.get(model_type, USUAL)


def families_that(fact: str) -> list[str]:
    """The families of which a fact is true, in order of their names."""
    return [name for name, family in sorted(MODEL_FAMILIES.items()) if getattr(family, fact)]
