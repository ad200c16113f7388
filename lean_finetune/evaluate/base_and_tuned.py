"""The base and the tuned model on the same held-out rows: one after the other, never both in memory."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from lean_finetune.core.errors import UserError
from lean_finetune.evaluate.generate import Prompt, greedy_answers, stop_ids
from lean_finetune.evaluate.row_losses import row_losses
from lean_finetune.model.adapters import load_adapter
from lean_finetune.model.attention import generation_attention
from lean_finetune.model.load_model import load_base
from lean_finetune.model.merge_adapters import MERGED
from lean_finetune.model.model_config import read_config
from lean_finetune.model.model_spec import WeightsSpec
from lean_finetune.step.evaluation_limits import EvaluationLimits
from lean_finetune.step.oom_errors import is_out_of_memory
from lean_finetune.step.token_rows import TokenRows

MODELS = ("base", "tuned")


@dataclass(frozen=True, kw_only=True)
class Questions:
    """What both models are asked."""

    rows: TokenRows
    loss_rows: list[int]
    """Row numbers whose loss is taken."""
    prompts: list[Prompt]
    unanswerable_rows: int
    """Rows that gave no prompt because they are too long to be answered."""
    special: set[int]
    """Ids of special tokens."""
    eos_id: int | None
    pad_id: int


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What one model made of the questions."""

    row_losses: np.ndarray
    """Summed cross-entropy of each of `Questions.loss_rows`, float64."""
    answers: list[list[int]]
    """Generated tokens for each of `Questions.prompts`."""


NO_ANSWERS = Answers(row_losses=np.zeros(0), answers=[])
"""What a model that was asked nothing makes of it."""


def evaluate_models(
    base: Path,
    tuned: Path,
    spec: WeightsSpec,
    questions: Questions,
    limits: EvaluationLimits,
    *,
    device: torch.device,
    progress: bool,
    merged: bool = False,
) -> dict[str, Answers]:
    """Ask the base, then the tuned model, then with `merged` the merged one; keys are `MODELS` and `MERGED`.

    Raises:
        UserError: a model cannot be loaded, does not fit in memory, or has losses that are not finite.
    """
    answers: dict[str, Answers] = {}
    try:
        for name, model in _models(base, tuned, spec, device, merged):
            answers[name] = _ask(name, model, spec, questions, limits, device, progress)
            # Gone before the next is loaded.
            del model
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        name = [*MODELS, MERGED][len(answers)]
        raise UserError(
            f"evaluate.max_tokens: the {name} model ran out of memory on {device}; got {limits.max_tokens}, "
            f"evaluate.logits_chunk={limits.logits_chunk}, evaluate.generate_batch_rows={limits.generate_batch_rows}; "
            "lower them, or free memory"
        ) from None
    return answers


def _models(
    base: Path, tuned: Path, spec: WeightsSpec, device: torch.device, merged: bool
) -> Iterator[tuple[str, nn.Module]]:
    """Each model by name; an adapter is loaded once and switched off for the base."""
    attention = generation_attention(read_config(base))
    if spec.method == "full":
        for name, directory in zip(MODELS, (base, tuned), strict=True):
            yield name, load_base(directory, spec, device, attention).eval()
        return
    adapted = load_adapter(load_base(base, spec, device, attention), tuned, spec).eval()
    with adapted.disable_adapter():
        yield "base", adapted
    yield "tuned", adapted
    if merged:
        del adapted
        yield MERGED, load_base(tuned / MERGED, replace(spec, method="full"), device, attention).eval()


def _ask(
    name: str,
    model: nn.Module,
    spec: WeightsSpec,
    questions: Questions,
    limits: EvaluationLimits,
    device: torch.device,
    progress: bool,
) -> Answers:
    """One model's losses and answers."""
    with tqdm(total=len(questions.loss_rows), desc=f"{name} loss", unit=" rows", disable=not progress) as bar:
        losses = row_losses(
            model,
            spec,
            questions.rows,
            questions.loss_rows,
            max_tokens=limits.max_tokens,
            logits_chunk=limits.logits_chunk,
            pad_id=questions.pad_id,
            device=device,
            progress=bar,
        )
    with tqdm(total=len(questions.prompts), desc=f"{name} answers", unit=" rows", disable=not progress) as bar:
        answers = greedy_answers(
            model,
            spec,
            questions.prompts,
            stops=stop_ids(model, questions.eos_id, questions.prompts, questions.special),
            limits=limits,
            pad_id=questions.pad_id,
            device=device,
            progress=bar,
        )
    if not np.isfinite(losses).all():
        row = questions.loss_rows[int(np.flatnonzero(~np.isfinite(losses))[0])]
        raise UserError(
            f"{questions.rows.path}: loss of the {name} model must be finite; it is not for row {row}; "
            "look at the training curves, or train in another precision"
        )
    return Answers(row_losses=losses, answers=answers)
