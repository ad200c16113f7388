"""Generate greedy answers to held-out prompts.

Shapes: B prompts, T tokens to which prompts are padded on the left.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from lean_finetune.config.train_schema import BaseWeights
from lean_finetune.core.progress_bar import progress_bar
from lean_finetune.model.precision import autocast
from lean_finetune.step.evaluation_limits import EvaluationLimits
from lean_finetune.step.loss import causal_lm
from lean_finetune.step.token_rows import TokenRows

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


def choose_prompts(
    rows: TokenRows,
    count: int,
    *,
    max_length: int,
    max_prompt_tokens: int | None,
    max_new_tokens: int,
    special: set[int],
) -> tuple[list[Prompt], int]:
    """Return at most `count` distinct prompts, spread evenly over families, and the number of rows that are too long.

    Within a family prompts are ordered by hash: independent of the file's order and of the seed. Rows without a prompt
    (plain text) are skipped. Rows are too long if the prompt exceeds `max_prompt_tokens`, if the answer was truncated
    at `max_length`, or if it exceeds `max_new_tokens` (without its end token): no model could match them.
    """
    too_long = 0
    # Only digests and row numbers: the prompts of all rows would take kilobytes each.
    families: dict[str, dict[bytes, int]] = {}
    for row in rows.used.tolist():
        ids = rows.ids(row)
        start, end = rows.spans(row)[-1].tolist()
        if all(token in special for token in ids[:start].tolist()):
            continue
        answer_tokens = end - start - (int(ids[end - 1]) in special)
        prompt_too_long = max_prompt_tokens is not None and start > max_prompt_tokens
        if prompt_too_long or end == max_length or answer_tokens > max_new_tokens:
            too_long += 1
            continue
        digest = hashlib.sha256(ids[:start].astype("<i4").tobytes()).digest()
        families.setdefault(rows.family(row) or NO_FAMILY, {}).setdefault(digest, row)
    rounds = zip_longest(
        *([(name, found[digest]) for digest in sorted(found)] for name, found in sorted(families.items()))
    )
    chosen = [one for one_of_each in rounds for one in one_of_each if one is not None][:count]
    prompts = []
    for family, row in chosen:
        ids = rows.ids(row).tolist()
        start, end = rows.spans(row)[-1].tolist()
        prompts.append(Prompt(family=family, ids=ids[:start], answer_ids=ids[start:end]))
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
) -> list[list[int]]:
    """Return the greedy answer to each prompt, without its stop token and up to `limits.max_new_tokens`.

    Prompts of similar length are decoded together, longest first. `progress` is the title of a progress bar.
    """
    set_decoding(model, stops=stops, max_new_tokens=limits.max_new_tokens, pad_id=pad_id)
    answers: dict[int, list[int]] = {}
    order = sorted(range(len(prompts)), key=lambda number: (-len(prompts[number].ids), number))
    with progress_bar(total=len(prompts), desc=progress, unit=" rows", disable=progress is None) as bar:
        while order:
            at_once = limits.prompts_at_once(len(prompts[order[0]].ids))
            numbers, order = order[:at_once], order[at_once:]
            found = answers_of_batch(model, weights, [prompts[number].ids for number in numbers], stops, pad_id, device)
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
    lm.get_output_embeddings().weight.requires_grad_(True)


@torch.no_grad()
def answers_of_batch(
    model: nn.Module,
    weights: BaseWeights,
    prompts: Sequence[Sequence[int]],
    stops: Sequence[int],
    pad_id: int,
    device: torch.device,
    streamer: BaseStreamer | None = None,
) -> list[list[int]]:
    """Answers without their stop tokens to prompts decoded together; `streamer` gets the tokens of a single prompt."""
    lm: Any = causal_lm(model)
    length = max(map(len, prompts))
    ids_BT = torch.full((len(prompts), length), pad_id)
    mask_BT = torch.zeros_like(ids_BT)
    for row, ids in enumerate(prompts):
        start = length - len(ids)  # Padded on the left.
        ids_BT[row, start:] = torch.tensor(ids)
        mask_BT[row, start:] = 1
    with autocast(weights, device.type):
        output = lm.generate(input_ids=ids_BT.to(device), attention_mask=mask_BT.to(device), streamer=streamer)
    answers = output[:, length:].tolist()
    ends = (next((k for k, token in enumerate(tokens) if token in stops), len(tokens)) for tokens in answers)
    return [tokens[:end] for tokens, end in zip(answers, ends, strict=True)]
