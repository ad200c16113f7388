"""The dropout that a model's config names."""

from typing import Any

from torch import nn

from lean_finetune.config.schema import Train

HEAD_DROPOUTS = {"classifier_dropout", "summary_first_dropout"}
"""Dropouts of classification heads, which configs name and causal models do not have."""


def has_dropout(config: Any, train: Train) -> bool:
    """Whether training drops values: in adapters, or by the model's config (attention_dropout, resid_pdrop, …)."""
    values = config.get_text_config().to_dict()
    named = any(
        isinstance(v, float) and v > 0 for key, v in values.items() if "drop" in key and key not in HEAD_DROPOUTS
    )
    return train.lora.dropout > 0 or (named and not train.goal.has_reference)


def switch_off_dropout(model: nn.Module, train: Train) -> None:
    """Switch off the model's own dropout if the objective compares log-probabilities with a reference's.

    The config keeps its values, with which a fully trained model is saved.
    """
    if not train.goal.has_reference:
        return
    for module in model.modules():
        rates = [name for name, value in vars(module).items() if "drop" in name and isinstance(value, float)]
        for name in ("p", *rates) if isinstance(module, nn.modules.dropout._DropoutNd) else rates:
            setattr(module, name, 0.0)
