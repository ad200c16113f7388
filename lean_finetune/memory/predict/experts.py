"""Refuse mixtures of experts, whose memory depends on the data."""

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from lean_finetune.core.errors import UserError
from lean_finetune.model.empty_model import meta_model

EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names of the number of experts in configurations and modules."""


def refuse_experts(config: PretrainedConfig) -> None:
    """Refuse mixtures of experts: how many tokens an expert gets depends on the data.

    Raises:
        UserError: the model has experts.
    """
    experts = _experts(config.get_text_config().to_dict())
    if experts > 1 and _has_experts(config):
        raise UserError(
            f"model.name: {config.model_type} routes tokens to {experts} experts, so its memory depends on the "
            "data and cannot be predicted yet; choose a dense model"
        )


def _experts(values: Mapping[str, Any]) -> int:
    """Largest number of experts in a configuration and its parts."""
    own = [values[key] for key in EXPERT_KEYS if isinstance(values.get(key), int)]
    return max([*own, *(_experts(part) for part in values.values() if isinstance(part, dict))], default=0)


def _has_experts(config: PretrainedConfig) -> bool:
    """Whether any module has experts: a dense model's config may contain its family's default number."""
    try:
        modules = list(meta_model(config).modules())
    except UserError:  # It cannot be built: trust its config.
        return True
    counts = (getattr(module, key, None) for module in modules for key in EXPERT_KEYS)
    return any(isinstance(count, int) and count > 1 for count in counts)
