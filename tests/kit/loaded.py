"""Load the model of a directory, as its own config says."""

from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from lean_finetune.config.schema import BaseWeights, Train
from lean_finetune.model import load_model as of_config
from lean_finetune.model.model_config import read_config


def load_model(
    directory: Path,
    train: Train,
    device: torch.device,
    seed: int = 0,
    adapter: Path | None = None,
    *,
    images: bool = False,
) -> nn.Module:
    """A model ready for training, as `lean_finetune.model.load_model.load_model` loads it."""
    config = read_config(directory, scores=train.scores, whole=images)
    return of_config.load_model(directory, config, train, device, seed, adapter)


def load_base(
    directory: Path,
    weights: BaseWeights,
    device: torch.device,
    attention: str | None = None,
    *,
    scores: bool = False,
    seed: int = 0,
) -> PreTrainedModel:
    """The base of a model, as `lean_finetune.model.load_model.load_base` loads it."""
    config = read_config(directory, scores=scores)
    return of_config.load_base(directory, config, weights, device, attention, seed=seed if scores else None)
