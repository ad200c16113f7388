"""The learning rate of a run: train.lr, or what is usual for the model."""

import math

from transformers import PretrainedConfig

from cuda_memory.units import significant
from lean_finetune.config.schema import Train
from lean_finetune.model.empty_model import meta_model

USUAL_LRS: tuple[tuple[float, float, float], ...] = (
    (20e6, 3e-3, 3e-3),
    (3e9, 3e-4, 2e-5),
    (20e9, 2e-4, 1e-5),
    (math.inf, 1e-4, 5e-6),
)
"""Parameters of models below this size, learning rate of adapters, and of all weights.

Adapters from 7 B: Dettmers et al. 2023 (arXiv 2305.14314, table 9: 2e-4 at 7 B and 13 B, 1e-4 at 33 B and 65 B). All
weights: 2e-5 at 7 B (Alpaca, 2023), 5e-6 at 8 B and 2e-6 at 70 B (Lambert et al. 2024, arXiv 2411.15124), and between.
The first line is what suits the shipped model."""


def usual_lr(config: PretrainedConfig, train: Train) -> tuple[float, str]:
    """The learning rate for a model and a method, and the reason."""
    parameters = sum(parameter.numel() for parameter in meta_model(config).parameters())
    _, adapters, all_weights = next(line for line in USUAL_LRS if parameters < line[0])
    trained, lr = ("adapters on", adapters) if train.adapted else ("all weights of", all_weights)
    size = f"{significant(parameters / 1e9, 3)} B" if parameters >= 1e9 else f"{significant(parameters / 1e6, 3)} M"
    objective = f"{train.objective} of " if train.goal.compares else ""
    return lr * train.goal.lr_share, f"usual for {objective}{trained} {size} parameters"


def lr_of(train: Train, config: PretrainedConfig) -> tuple[float, str | None]:
    """What train.lr means, and a line that says so if it is automatic."""
    if train.lr != "auto":
        return train.lr, None
    lr, reason = usual_lr(config, train)
    return lr, f"train.lr: auto is {lr:g}: {reason}"
