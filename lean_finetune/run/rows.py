"""Rows of tokens as a run's model takes them."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from transformers import PretrainedConfig

from lean_finetune.config.schema import Train
from lean_finetune.objectives.row_kind import REFERENCE
from lean_finetune.run.assets import Assets
from lean_finetune.step.reference_table import identity, read_table
from lean_finetune.step.token_rows import Split, TokenRows


def complete_rows(
    splits: Mapping[Split, TokenRows],
    assets: Assets,
    config: PretrainedConfig,
    train: Train,
    *,
    tokens: Path,
    reference: Path,
) -> None:
    """Give the rows of `tokens` what they need besides their files: the model's arguments, log-probabilities.

    The log-probabilities are those of stage reference; of an objective without a reference, 0.

    Raises:
        UserError: the model's files do not make its arguments, or `reference` has no tables of these rows.
    """
    for rows in splits.values():
        rows.attached = tuple(one.for_model(assets.directory, config) for one in rows.attached)
    of = identity(tokens, assets.lock, train) if train.goal.has_reference else None
    for split, rows in splits.items():
        without = np.zeros(len(rows), np.float32)
        rows.give(REFERENCE, without if of is None else read_table(reference / f"{split}.arrow", of, len(rows)))
