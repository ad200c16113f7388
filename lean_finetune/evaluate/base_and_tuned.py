"""Evaluate the base and the tuned model, and compare them."""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import nn

from lean_finetune.config.schema import BaseWeights
from lean_finetune.core.errors import DoesNotFit, UserError
from lean_finetune.evaluate.closed_answers import closed_answers, is_exact_match
from lean_finetune.evaluate.generate import NO_FAMILY, Prompt, greedy_answers, row_sums, stop_ids
from lean_finetune.evaluate.harness_tasks import HarnessTasks
from lean_finetune.model.attention_choice import generation_attention
from lean_finetune.model.beside.parts import adapted_parts
from lean_finetune.model.beside.whole_config import any_beside
from lean_finetune.model.merge_adapters import MERGED
from lean_finetune.model.model_config import read_config
from lean_finetune.pinning.adapter_files import AGAIN, adapter_tensors
from lean_finetune.pinning.config_file import ADAPTER_WEIGHTS
from lean_finetune.rows.attachment import need_whole_model
from lean_finetune.rows.held_out_answers import HeldoutAnswers
from lean_finetune.run.assets import Assets
from lean_finetune.step.batches import Batch, with_parts
from lean_finetune.step.evaluation_limits import EvaluationLimits
from lean_finetune.step.loss import negative_scores, token_losses
from lean_finetune.step.token_rows import TokenRows
from lean_finetune.train.monitor.out_of_memory import is_out_of_memory

MODELS = ("base", "tuned")


@dataclass(frozen=True, kw_only=True)
class EvaluationRows:
    """Held-out rows and prompts on which both models are evaluated."""

    rows: TokenRows
    loss_rows: list[int]
    """Rows whose loss is computed."""
    prompts: list[Prompt]
    unanswerable_rows: int
    """Rows that are not answered because their prompt is too long."""
    special: set[int]
    """Ids of special tokens."""
    eos_id: int | None
    pad_id: int
    compared: HeldoutAnswers
    """For figures of the objective; the better answers are `loss_rows`."""

    def complete(self, batch: Batch, rows: np.ndarray) -> Batch:
        """A batch of these rows with what they carry for the model."""
        return with_parts(batch, self.rows, rows)

    def show(self, ids_BT: torch.Tensor, files: Sequence[Sequence[bytes]]) -> dict[str, torch.Tensor]:
        """The model's arguments in generation for padded tokens and the files of each row."""
        found = (one.for_generation(ids_BT, files) for one in self.rows.attached)
        return {name: value for arguments in found for name, value in arguments.items()}


@dataclass(frozen=True, kw_only=True)
class ModelOutputs:
    """Losses and answers of one model."""

    row_losses: np.ndarray
    """Summed cross-entropy of each of `EvaluationRows.loss_rows`, float64."""
    answers: list[list[int]]
    """Generated tokens for each of `EvaluationRows.prompts`."""
    other_losses: np.ndarray = field(default_factory=partial(np.zeros, 0))
    """The same of each of `EvaluationRows.compared.others`."""
    tasks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What `score_tasks` returns."""


def evaluate_models(
    assets: Assets,
    tuned: Path,
    weights: BaseWeights,
    evaluated: EvaluationRows,
    limits: EvaluationLimits,
    *,
    device: torch.device,
    progress: bool,
    merged: bool = False,
    tasks: HarnessTasks | None = None,
    seed: int = 0,
) -> dict[str, ModelOutputs]:
    """Evaluate the base, the tuned and, with `merged`, the merged model; keys are `MODELS` and `MERGED`.

    The base is the model from which training started: with the adapter that went on, and with the head of a reward
    model that `seed` gave it.

    Raises UserError if a model cannot be loaded, does not fit in memory, or has losses that are not finite.
    """
    outputs: dict[str, ModelOutputs] = {}
    summed = [*evaluated.loss_rows, *evaluated.compared.others]
    if not summed and tasks is None:
        return {name: ModelOutputs(row_losses=np.zeros(0), answers=[]) for name in MODELS}
    shared: dict[str, Any] = {"limits": limits, "pad_id": evaluated.pad_id, "device": device}
    try:
        # A missing file is named when the adapter is loaded.
        has_adapter = weights.method != "full" and (tuned / ADAPTER_WEIGHTS).is_file()
        whole = has_adapter and any_beside(adapter_tensors(tuned))
        scored, whole = evaluated.compared.scored, whole or need_whole_model(evaluated.rows.attached)

        def load(one: Assets, stored: BaseWeights = weights) -> Any:
            config = read_config(one.directory, scores=scored, whole=whole)
            attention = generation_attention(config)
            return one.load(config, stored, device, attention, seed=seed)

        for name, model in _models(assets, tuned, load, weights, merged):
            loss_title, answers_title = (f"{name} {what}" if progress else None for what in ("loss", "answers"))
            rows, loss_rows, prompts = evaluated.rows, evaluated.loss_rows, evaluated.prompts
            stops = stop_ids(model, evaluated.eos_id, prompts, evaluated.special)
            of_tokens = negative_scores if scored else token_losses
            shared_rows = {**shared, "progress": loss_title, "of_tokens": of_tokens, "complete": evaluated.complete}
            losses = row_sums(model, weights, rows.gather, rows.lengths, summed, **shared_rows)
            decoding = {**shared, "stops": stops, "progress": answers_title, "show": evaluated.show}
            answers = greedy_answers(model, weights, prompts, **decoding)
            if not np.isfinite(losses).all():
                raise UserError(
                    f"{rows.path}: loss of the {name} model must be finite; it is not for row "
                    f"{summed[int(np.isfinite(losses).argmin())]}; check the training curves, or train in another "
                    "precision"
                )
            scores = {} if tasks is None else _scores(tasks, model, stops)
            row_losses, other_losses = np.split(losses, [len(loss_rows)])
            outputs[name] = ModelOutputs(
                row_losses=row_losses, answers=answers, other_losses=other_losses, tasks=scores
            )
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


def _scores(tasks: HarnessTasks, model: nn.Module, stops: list[int]) -> dict[str, dict[str, Any]]:
    from lean_finetune.evaluate.harness_model import score_tasks  # Here: needs a package that may not be installed.

    return score_tasks(tasks, model, stops)


@contextmanager
def _of_training() -> Iterator[None]:
    """Name the result of training in errors of the functions that read any adapter."""
    try:
        yield
    except UserError as error:
        message = str(error).removeprefix("model.adapter: ")
        again = message.removesuffix(AGAIN)
        raise UserError(
            message if again == message else f"{again}check the training curves, and run `dvc repro`"
        ) from None


def _models(
    assets: Assets, tuned: Path, load: Callable[..., Any], weights: BaseWeights, merged: bool
) -> Iterator[tuple[str, nn.Module]]:
    """Yield each model with its name; the base is the adapted one without its adapter, or with that of the start.

    An adapter with trained parts beside the decoder replaces those of its base, which is loaded on its own then.

    `load` takes the files of a model, and how its weights are stored if that is not `weights`.
    """
    if weights.method == "full":
        for name, one in zip(MODELS, (assets, Assets(directory=tuned)), strict=True):
            yield name, load(one)
        return
    replaces_parts = (tuned / ADAPTER_WEIGHTS).is_file() and "full" in adapted_parts(adapter_tensors(tuned)).values()
    apart = replaces_parts or assets.adapter is not None
    if apart:
        yield "base", load(assets)
    with _of_training():
        adapted = load(replace(assets, adapter=tuned))
    if not apart:
        with adapted.disable_adapter():
            yield "base", adapted
    yield "tuned", adapted
    if merged:
        del adapted
        yield MERGED, load(Assets(directory=tuned / MERGED), weights.model_copy(update={"method": "full"}))


# Compute the metrics of each model, and the lines of generations.jsonl.

RESULTS = ("tuned_loss", "tuned_exact_match_percent", "base_loss", "base_exact_match_percent")
"""Figures in metrics/evaluate.json, by which runs are compared, in the order of columns of `dvc exp show`."""
LENGTH_EDGES = (64, 128, 256, 512)
"""Upper limits of the length buckets, in tokens of a row; the last bucket has none."""
LARGEST_EXPONENT = math.log(sys.float_info.max)
"""Above this, `exp` overflows."""


def generation_lines(
    evaluated: EvaluationRows, answers: Mapping[str, ModelOutputs], tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    """Return a record per prompt: its text with control tokens, expected and generated answers, whether correct.

    Correctness is None where the expected answer is free text, truncated, or longer than the longest generated one.
    The hashes of a prompt's files are their names in data/tokens.
    """
    texts = [tokenizer.decode(prompt.answer_ids, skip_special_tokens=True) for prompt in evaluated.prompts]
    closed = closed_answers(texts, [prompt.family for prompt in evaluated.prompts], NO_FAMILY)
    lines = []
    for number, (prompt, expected) in enumerate(zip(evaluated.prompts, texts, strict=True)):
        compared = prompt.can_match and closed[number]
        line: dict[str, Any] = {
            "family": prompt.family,
            "prompt": tokenizer.decode(prompt.ids, skip_special_tokens=False),
            "expected": expected,
        }
        for one in evaluated.rows.attached if prompt.files else ():
            if one.whole_model:
                line[one.name] = [digest.hex() for digest in prompt.files]
        for name in answers:
            line[name] = tokenizer.decode(answers[name].answers[number], skip_special_tokens=True)
            line[f"{name}_correct"] = is_exact_match(expected, line[name]) if compared else None
        lines.append(line)
    return lines


def evaluate_metrics(
    evaluated: EvaluationRows, answers: Mapping[str, ModelOutputs], lines: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return loss (nats per trained token) and perplexity in total and by row length; exact match also by family."""
    rows, loss_rows = evaluated.rows, evaluated.loss_rows
    if evaluated.compared.scored:  # A reward model has no loss of tokens.
        loss_rows, answers = [], dict.fromkeys(answers, ModelOutputs(row_losses=np.zeros(0), answers=[]))
    tokens = rows.supervised[loss_rows]
    lengths = rows.lengths[loss_rows]
    buckets = {f"up_to_{high}": (low < lengths) & (lengths <= high) for low, high in pairwise((0, *LENGTH_EDGES))}
    buckets[f"over_{LENGTH_EDGES[-1]}"] = lengths > LENGTH_EDGES[-1]
    families: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        families.setdefault(line["family"], []).append(line)
    return {
        "evaluated_rows": len(tokens),
        "evaluated_tokens": int(tokens.sum()),
        "generated_rows": len(lines),
        "compared_rows": sum(line["tuned_correct"] is not None for line in lines),
        "free_text_rows": sum(
            line["tuned_correct"] is None and prompt.can_match
            for prompt, line in zip(evaluated.prompts, lines, strict=True)
        ),
        "unanswerable_rows": evaluated.unanswerable_rows,
        **_losses(answers, tokens, np.ones(len(tokens), dtype=bool)),
        **_merge_loss(answers, tokens),
        **_exact_match(lines, answers),
        "by_length": {
            name: {"rows": int(chosen.sum()), **_losses(answers, tokens, chosen)}
            for name, chosen in buckets.items()
            if chosen.any()
        },
        "by_family": {
            family: {"rows": len(own), **_exact_match(own, answers)} for family, own in sorted(families.items())
        },
    }


def _losses(answers: Mapping[str, ModelOutputs], tokens: np.ndarray, chosen: np.ndarray) -> dict[str, float | None]:
    """Return mean loss per trained token of the chosen rows, and its exponential, for each model.

    None stands for a perplexity too large for a float, and for the loss of no rows.
    """
    found: dict[str, float | None] = {}
    for name in answers:
        loss = float(answers[name].row_losses[chosen].sum() / tokens[chosen].sum()) if chosen.any() else None
        found[f"{name}_loss"] = None if loss is None else round(loss, 6)
        found[f"{name}_perplexity"] = None if loss is None or loss >= LARGEST_EXPONENT else round(math.exp(loss), 6)
    return found


def _merge_loss(answers: Mapping[str, ModelOutputs], tokens: np.ndarray) -> dict[str, float]:
    """Return the change of the loss per trained token by merging; empty without a merged model."""
    if MERGED not in answers or not len(tokens):
        return {}
    change = answers[MERGED].row_losses.sum() - answers["tuned"].row_losses.sum()
    return {"merged_minus_tuned_loss": round(float(change / tokens.sum()), 9)}


def _exact_match(lines: Sequence[Mapping[str, Any]], names: Iterable[str]) -> dict[str, float | None]:
    """Return the percentage of correct answers of each model, of those that can be; None if there are none."""
    found: dict[str, float | None] = {}
    for name in names:
        correct = [line[f"{name}_correct"] for line in lines if line[f"{name}_correct"] is not None]
        found[f"{name}_exact_match_percent"] = round(100 * sum(correct) / len(correct), 3) if correct else None
    return found
