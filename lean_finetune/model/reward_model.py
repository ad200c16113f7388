"""Reward models: transformers' sequence classifiers with one output, which is the score of a row at its last token."""

import copy
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel

from lean_finetune.core.errors import UserError

SCORE = "score"
"""Name of the head in the decoders that transformers has classifiers of."""
USUAL_RANGE = 0.02
"""Standard deviation of a new head's weights where a config names none; transformers' own."""


class ScoredModel:
    """Mixed into a family's classifier: its head is the model's output layer."""

    def get_output_embeddings(self) -> nn.Module:
        """The head."""
        return self.score  # type: ignore[attr-defined]


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
