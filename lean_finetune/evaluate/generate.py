"""Losses and answers of a model for held-out rows."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from peft.utils.other import TrainableTokensWrapper
from tokenizers import Tokenizer
from torch import nn
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from lean_finetune.config.schema import BaseWeights
from lean_finetune.core.progress import progress_bar
from lean_finetune.model.precision import autocast
from lean_finetune.rows.attachment import files_of
from lean_finetune.step.batches import Batch, RowTokens, collate
from lean_finetune.step.evaluation_limits import EvaluationLimits
from lean_finetune.step.loss import causal_lm, token_losses
from lean_finetune.step.token_rows import TokenRows

# Compute the held-out loss of each row, so that one pass gives the total and every length bucket.
#
# Shapes: B rows, T padded tokens, N trained tokens of a batch.


def spread_rows(rows: np.ndarray, count: int | None) -> list[int]:
    """Return `count` evenly spaced row numbers; all of them for None or if there are fewer."""
    if count is None or count >= len(rows):
        return rows.tolist()
    return rows[np.arange(count) * len(rows) // count].tolist()


def batch_rows(lengths: np.ndarray, numbers: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Split rows, longest first (ties by row number), into batches of at most `max_tokens` padded tokens.

    Longest first, so that a batch too large for memory fails at once. A row longer than `max_tokens` is its own batch.
    """
    batch: list[int] = []
    for row in sorted(numbers, key=lambda row: (-lengths[row], row)):
        if batch and (len(batch) + 1) * lengths[batch[0]] > max_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def row_sums(
    model: nn.Module,
    weights: BaseWeights,
    gather: Callable[[np.ndarray], list[RowTokens]],
    lengths: np.ndarray,
    numbers: Sequence[int],
    limits: EvaluationLimits,
    *,
    pad_id: int,
    device: torch.device,
    progress: str | None = None,
    of_tokens: Callable[[nn.Module, Batch, int], torch.Tensor] = token_losses,
    complete: Callable[[Batch, np.ndarray], Batch] = lambda batch, rows: batch,
) -> np.ndarray:
    """Return the sum of the trained tokens' cross-entropy in each row of `numbers`, in this order, float64.

    `gather` returns tokens and trained spans of rows, `lengths` are the tokens of all rows, and `progress` is the title
    of a progress bar. `of_tokens` may return other figures of a batch, of shape (N, …); its last argument is
    `limits.logits_chunk`, the number of trained tokens whose logits exist at a time. `complete` adds what
    rows carry to a batch.
    """
    sums: dict[int, list[float] | float] = {}
    with progress_bar(total=len(numbers), desc=progress, unit=" rows", disable=progress is None) as bar:
        for batch_numbers in batch_rows(lengths, numbers, limits.max_tokens):
            length = int(lengths[batch_numbers[0]])
            rows = np.array(batch_numbers)
            batch = complete(collate(gather(rows), length, pad_id), rows)
            with torch.no_grad(), autocast(weights, device.type):
                figures_N = of_tokens(model, batch.to(device), limits.logits_chunk).double().cpu()
            sums_B = torch.zeros((len(batch_numbers), *figures_N.shape[1:]), dtype=torch.float64)
            sums_B.index_add_(0, batch.supervised_index_N // length, figures_N)
            sums.update(zip(batch_numbers, sums_B.tolist(), strict=True))
            bar.update(len(batch_numbers))
    return np.array([sums[row] for row in numbers])


# Generate greedy answers to held-out prompts.
#
# Shapes: B prompts, T tokens to which prompts are padded on the left.

Arguments = Mapping[str, torch.Tensor]
"""Arguments of the model besides tokens, by name."""
ShowFiles = Callable[[torch.Tensor, Sequence[Sequence[bytes]]], Arguments]
"""The model's arguments in generation for padded tokens (B, T), and the hashes of each prompt's files."""
NO_FAMILY = "all"
"""Family of rows without one."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt and its expected answer, from one row."""

    family: str
    ids: list[int]
    """Tokens before the row's last trained span."""
    answer_ids: list[int]
    """Tokens of that span."""
    files: tuple[bytes, ...] = ()
    """The hashes of the row's files, whose tokens are in `ids`."""
    can_match: bool = True
    """Whether a generated answer can be equal: the expected one is whole and not longer than the limit."""


def choose_prompts(
    rows: TokenRows,
    count: int,
    *,
    max_length: int,
    max_prompt_tokens: int | None,
    max_new_tokens: int,
    special: set[int],
) -> tuple[list[Prompt], int]:
    """Return at most `count` distinct prompts, spread evenly over families, and the number of those that are too long.

    Within a family prompts are ordered by hash: independent of the file's order and of the seed. Rows without a prompt
    (plain text) are skipped. A prompt is too long above `max_prompt_tokens`. A row whose own answer was truncated at
    `max_length`, or exceeds `max_new_tokens` (without its end token), is answered too, but no answer can match it.
    """
    too_long = 0
    # Only digests and row numbers: the prompts of all rows would take kilobytes each.
    families: dict[str, dict[bytes, int]] = {}
    for row in rows.used.tolist():
        ids = rows.ids(row)
        start, end = rows.spans(row)[-1].tolist()
        if all(token in special for token in ids[:start].tolist()):
            continue
        if max_prompt_tokens is not None and start > max_prompt_tokens:
            too_long += 1
            continue
        shown = b"".join(files_of(rows, row))  # The same question about another file is another prompt.
        digest = hashlib.sha256(ids[:start].astype("<i4").tobytes() + shown).digest()
        families.setdefault(rows.family(row) or NO_FAMILY, {}).setdefault(digest, row)
    rounds = zip_longest(
        *([(name, found[digest]) for digest in sorted(found)] for name, found in sorted(families.items()))
    )
    chosen = [one for one_of_each in rounds for one in one_of_each if one is not None][:count]
    prompts = []
    for family, row in chosen:
        ids = rows.ids(row).tolist()
        start, end = rows.spans(row)[-1].tolist()
        can_match = end < max_length and end - start - (ids[end - 1] in special) <= max_new_tokens
        files = tuple(files_of(rows, row))
        prompts.append(
            Prompt(family=family, ids=ids[:start], answer_ids=ids[start:end], files=files, can_match=can_match)
        )
    return prompts, too_long


def special_ids(tokenizer: Tokenizer) -> set[int]:
    """Return the ids of the tokenizer's special tokens."""
    return {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}


def stop_ids(model: nn.Module, eos_id: int | None, prompts: Sequence[Prompt], special: set[int]) -> list[int]:
    """Return tokens that end an answer: of the tokenizer, of the model, and special tokens that end expected answers.

    A chat template may end a turn with another token than the tokenizer's end of sequence.
    """
    of_model = causal_lm(model).generation_config.eos_token_id
    stops = {
        token for token in (eos_id, *(of_model if isinstance(of_model, list) else [of_model])) if token is not None
    }
    return sorted(stops | {prompt.answer_ids[-1] for prompt in prompts} & special)


@torch.no_grad()
def greedy_answers(
    model: nn.Module,
    weights: BaseWeights,
    prompts: Sequence[Prompt],
    *,
    stops: Sequence[int],
    limits: EvaluationLimits,
    pad_id: int,
    device: torch.device,
    progress: str | None = None,
    show: ShowFiles | None = None,
) -> list[list[int]]:
    """Return the greedy answer to each prompt, without its stop token and up to `limits.max_new_tokens`.

    Prompts of similar length are decoded together, longest first. `progress` is the title of a progress bar, and `show`
    opens their files.
    """
    set_decoding(model, stops=stops, max_new_tokens=limits.max_new_tokens, pad_id=pad_id)
    answers: dict[int, list[int]] = {}
    order = sorted(range(len(prompts)), key=lambda number: (-len(prompts[number].ids), number))
    with progress_bar(total=len(prompts), desc=progress, unit=" rows", disable=progress is None) as bar:
        while order:
            at_once = limits.prompts_at_once(len(prompts[order[0]].ids))
            numbers, order = order[:at_once], order[at_once:]
            chosen = [prompts[number] for number in numbers]
            shown = show if any(one.files for one in chosen) else None
            found = answers_of_batch(
                model,
                weights,
                [one.ids for one in chosen],
                stops,
                pad_id,
                device,
                arguments=shown and (lambda ids_BT, show=shown, of=chosen: show(ids_BT, [one.files for one in of])),
            )
            answers.update(zip(numbers, found, strict=True))
            bar.update(len(numbers))
    return [answers[number] for number in range(len(prompts))]


def set_decoding(
    model: nn.Module, *, stops: Sequence[int], max_new_tokens: int, pad_id: int, temperature: float = 0.0
) -> None:
    """Set how the model decodes: greedily, or with a temperature above 0 by sampling."""
    lm: Any = causal_lm(model)
    # Replaces the model's config, whose sampling or repetition settings greedy decoding must not use.
    lm.generation_config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        eos_token_id=list(stops) or None,
        pad_token_id=pad_id,
        use_cache=True,
        **({"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}),
    )
    # PyTorch multiplies the last positions of all prompts at once only if the weight requires a gradient. With a frozen
    # head it multiplies each separately, and in 16 bits on a CPU it copies the head each time.
    head = lm.get_output_embeddings()
    (head.original_module if isinstance(head, TrainableTokensWrapper) else head).weight.requires_grad_(True)


@torch.no_grad()
def answers_of_batch(
    model: nn.Module,
    weights: BaseWeights,
    prompts: Sequence[Sequence[int]],
    stops: Sequence[int],
    pad_id: int,
    device: torch.device,
    streamer: BaseStreamer | None = None,
    arguments: Callable[[torch.Tensor], Arguments] | None = None,
) -> list[list[int]]:
    """Answers without their stop tokens to prompts decoded together; `streamer` gets the tokens of a single prompt.

    `arguments` makes the model's for what prompts have besides tokens, from their padded tokens.
    """
    lm: Any = causal_lm(model)
    length = max(map(len, prompts))
    ids_BT = torch.full((len(prompts), length), pad_id)
    mask_BT = torch.zeros_like(ids_BT)
    for row, ids in enumerate(prompts):
        start = length - len(ids)  # Padded on the left.
        ids_BT[row, start:] = torch.tensor(ids)
        mask_BT[row, start:] = 1
    more = {} if arguments is None else {name: value.to(device) for name, value in arguments(ids_BT).items()}
    with autocast(weights, device.type):
        output = lm.generate(input_ids=ids_BT.to(device), attention_mask=mask_BT.to(device), streamer=streamer, **more)
    answers = output[:, length:].tolist()
    ends = (next((k for k, token in enumerate(tokens) if token in stops), len(tokens)) for tokens in answers)
    return [tokens[:end] for tokens, end in zip(answers, ends, strict=True)]
