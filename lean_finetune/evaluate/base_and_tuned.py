"""Evaluate the base and the tuned model on the same held-out rows, one after the other to save memory."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from lean_finetune.config.train_schema import BaseWeights
from lean_finetune.core.errors import DoesNotFit, UserError
from lean_finetune.evaluate.generate import Prompt, greedy_answers, stop_ids
from lean_finetune.evaluate.harness_tasks import HarnessTasks
from lean_finetune.evaluate.row_losses import row_sums
from lean_finetune.model.adapters import load_adapter
from lean_finetune.model.attention_choice import generation_attention
from lean_finetune.model.load_model import load_base
from lean_finetune.model.merge.merge_adapters import MERGED
from lean_finetune.model.model_config import read_config
from lean_finetune.step.evaluation_limits import EvaluationLimits
from lean_finetune.step.token_rows import TokenRows
from lean_finetune.train.oom.oom_state import is_out_of_memory

MODELS = ("base", "tuned")


@dataclass(frozen=True, kw_only=True)
class EvaluationRows:
    """Held-out rows and prompts on which both models are evaluated."""

    rows: TokenRows
    loss_rows: list[int]
    """Rows whose loss is computed."""
    prompts: list[Prompt]
    unanswerable_rows: int
    """Rows without a prompt because prompt or answer is too long."""
    special: set[int]
    """Ids of special tokens."""
    eos_id: int | None
    pad_id: int


@dataclass(frozen=True, kw_only=True)
class ModelOutputs:
    """Losses and answers of one model."""

    row_losses: np.ndarray
    """Summed cross-entropy of each of `EvaluationRows.loss_rows`, float64."""
    answers: list[list[int]]
    """Generated tokens for each of `EvaluationRows.prompts`."""
    tasks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What `HarnessTasks.score` returns."""


def evaluate_models(
    base: Path,
    tuned: Path,
    weights: BaseWeights,
    evaluated: EvaluationRows,
    limits: EvaluationLimits,
    *,
    device: torch.device,
    progress: bool,
    merged: bool = False,
    tasks: HarnessTasks | None = None,
) -> dict[str, ModelOutputs]:
    """Evaluate the base, the tuned and, with `merged`, the merged model; keys are `MODELS` and `MERGED`.

    Raises UserError if a model cannot be loaded, does not fit in memory, or has losses that are not finite.
    """
    if not evaluated.loss_rows and tasks is None:
        return {name: ModelOutputs(row_losses=np.zeros(0), answers=[]) for name in MODELS}
    outputs: dict[str, ModelOutputs] = {}
    shared: dict[str, Any] = {"limits": limits, "pad_id": evaluated.pad_id, "device": device}
    try:
        for name, model in _models(base, tuned, weights, device, merged):
            loss_title, answers_title = (f"{name} {what}" if progress else None for what in ("loss", "answers"))
            rows, loss_rows, prompts = evaluated.rows, evaluated.loss_rows, evaluated.prompts
            stops = stop_ids(model, evaluated.eos_id, prompts, evaluated.special)
            losses = row_sums(model, weights, rows.gather, rows.lengths, loss_rows, **shared, progress=loss_title)
            answers = greedy_answers(model, weights, prompts, stops=stops, **shared, progress=answers_title)
            if not np.isfinite(losses).all():
                raise UserError(
                    f"{rows.path}: loss of the {name} model must be finite; it is not for row "
                    f"{loss_rows[int(np.isfinite(losses).argmin())]}; check the training curves, or train in another "
                    "precision"
                )
            scores = {} if tasks is None else tasks.score(model, stops)
            outputs[name] = ModelOutputs(row_losses=losses, answers=answers, tasks=scores)
            del model  # Free it before the next one is loaded.
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        name = [*MODELS, MERGED][len(outputs)]
        raise DoesNotFit(
            f"evaluate.max_tokens: the {name} model ran out of memory on {device}; got {limits.max_tokens}, "
            f"evaluate.logits_chunk={limits.logits_chunk}, evaluate.generate_batch_rows={limits.generate_batch_rows}; "
            "lower them, or free memory"
        ) from None
    return outputs


def _models(
    base: Path, tuned: Path, weights: BaseWeights, device: torch.device, merged: bool
) -> Iterator[tuple[str, nn.Module]]:
    """Yield each model with its name; the base model is the adapted one with its adapter disabled."""
    attention = generation_attention(read_config(base))
    if weights.method == "full":
        for name, directory in zip(MODELS, (base, tuned), strict=True):
            yield name, load_base(directory, weights, device, attention).eval()
        return
    adapted = load_adapter(load_base(base, weights, device, attention), tuned, weights).eval()
    with adapted.disable_adapter():
        yield "base", adapted
    yield "tuned", adapted
    if merged:
        del adapted
        yield MERGED, load_base(tuned / MERGED, weights.model_copy(update={"method": "full"}), device, attention).eval()
