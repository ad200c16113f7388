"""A model as lm-evaluation-harness calls it. Imported only if there are tasks: it needs the package `lm_eval`."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import lm_eval
import numpy as np
import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import nn

from lean_finetune.core.errors import RowFault, UserError
from lean_finetune.evaluate.generate import NO_FAMILY, Prompt, greedy_answers, row_sums
from lean_finetune.evaluate.harness_tasks import HarnessTasks
from lean_finetune.step.batches import Batch
from lean_finetune.step.loss import trained_logits


def losses_and_misses(model: nn.Module, batch: Batch, chunk: int) -> torch.Tensor:
    """Return cross-entropy of each trained token, and 1 where greedy decoding gives another token: (N, 2), fp32."""
    found = []
    for logits_CV, targets_C in trained_logits(model, batch, chunk):
        losses_C = torch.nn.functional.cross_entropy(logits_CV, targets_C, reduction="none")
        found.append(torch.stack((losses_C, (logits_CV.argmax(dim=-1) != targets_C).float()), dim=1))
    return torch.cat(found)


class HarnessModel(TemplateLM):
    """Scores and answers with the functions of the evaluation, so that no batch is larger than its limits.

    The harness's own model would compute the logits of all tokens of a batch at once.
    """

    def __init__(self, model: nn.Module, tasks: HarnessTasks, stops: Sequence[int]):
        """`stops` are tokens that end an answer."""
        super().__init__()
        self._model, self._tasks, self._stops = model, tasks, stops

    @property
    def tokenizer_name(self) -> str:
        """See the base class; it names cached prompts, which are not used."""
        return "tuned"

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render messages up to the start of the assistant's turn, or with False up to the end of its last message.

        A system message that the template refuses is left out, as the harness does.

        Raises:
            UserError: the template refuses the messages.
        """
        assert self._tasks.template is not None
        messages: list[dict[str, Any]] = [dict(message) for message in chat_history]
        without_system = [message for message in messages if message["role"] != "system"]
        for given in (messages, without_system):
            try:
                text = self._tasks.template.bounded_text(given, None, add_generation_prompt=add_generation_prompt)
            except RowFault as fault:
                refusal = fault
                continue
            if add_generation_prompt:
                return text
            last = given[-1]["content"].strip()
            return text[: text.rindex(last) + len(last)]
        raise UserError(f"evaluate.apply_chat_template: {refusal}; set it to false") from refusal

    @property
    def eot_token_id(self) -> int:
        """See the base class."""
        return self._tasks.eos_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context: that which the tokenizer puts first, else the end of text."""
        first = self._tasks.tokenizer.encode("").ids[:1]
        return first[0] if first else self._tasks.eos_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """See the base class."""
        encode = self._tasks.tokenizer.encode
        if add_special_tokens is None:
            first = self._tasks.tokenizer.id_to_token(self.prefix_token_id) or ""
            add_special_tokens = not (first and string.startswith(first))
        return encode(string, add_special_tokens=add_special_tokens).ids

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        """Return log-probability of each continuation, and whether it is greedy, from (texts, context ids, its ids)."""
        tasks, rows = self._tasks, []
        for _texts, context, continuation in requests:
            ids = [*context, *continuation][-tasks.max_length :]
            start = max(1, len(ids) - len(continuation))  # The first token of a row has no prediction.
            rows.append((np.array(ids), np.array([[start, len(ids)]])))
        sums = row_sums(
            self._model,
            tasks.weights,
            lambda numbers: [rows[number] for number in numbers],
            np.array([len(ids) for ids, _ in rows]),
            list(range(len(rows))),
            tasks.limits,
            pad_id=tasks.pad_id,
            device=tasks.device,
            of_tokens=losses_and_misses,
        )
        return [(-loss, misses == 0) for loss, misses in sums.tolist()]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """See the base class; a text is scored in windows of the longest row."""
        totals = []
        for text in (request.args[0] for request in requests):
            windows = get_rolling_token_windows(
                self.tok_encode(text, add_special_tokens=False), self.prefix_token_id, self._tasks.max_length - 1, 1
            )
            scored = self._loglikelihood_tokens([("", *make_disjoint_window(window)) for window in windows])
            totals.append(sum(log_probability for log_probability, _ in scored))
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """See the base class; greedy decoding, cut at the first stop text.

        Raises UserError if a task samples, or its answers are longer than the limits allow.
        """
        given = [normalize_gen_kwargs(request.args[1]) for request in requests]
        answers: dict[int, str] = {}
        for max_new_tokens in sorted({options["max_gen_toks"] for options in given}):
            numbers = [number for number, options in enumerate(given) if options["max_gen_toks"] == max_new_tokens]
            if any(given[number]["do_sample"] for number in numbers):
                raise UserError("evaluate.tasks: a task that samples its answers is not supported; remove it")
            texts = self._answers([requests[number].args[0] for number in numbers], max_new_tokens)
            for number, text in zip(numbers, texts, strict=True):
                for stop in filter(None, given[number]["until"]):
                    text = text.split(stop)[0]
                answers[number] = text
        return [answers[number] for number in range(len(requests))]

    def _answers(self, texts: Sequence[str], max_new_tokens: int) -> list[str]:
        """Return the greedy answer to each text, of at most `max_new_tokens` tokens."""
        tasks = self._tasks
        room = tasks.max_length - max_new_tokens
        if room < 1:
            raise UserError(
                f"evaluate.max_tokens: a task answers in up to {max_new_tokens} tokens, but a row has at most "
                f"{tasks.max_length}; raise evaluate.max_tokens (the model's own limit counts too) or remove the task"
            )
        prompts = [Prompt(family=NO_FAMILY, ids=self.tok_encode(text)[-room:], answer_ids=[]) for text in texts]
        found = greedy_answers(
            self._model,
            tasks.weights,
            prompts,
            stops=self._stops,
            limits=replace(tasks.limits, max_new_tokens=max_new_tokens),
            pad_id=tasks.pad_id,
            device=tasks.device,
        )
        return [tasks.tokenizer.decode(ids, skip_special_tokens=True) for ids in found]


def score_tasks(tasks: HarnessTasks, model: nn.Module, stops: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Return version, shots, rows, chat_template and metrics of each task; `stops` are tokens that end an answer.

    Raises UserError if the data of a task cannot be loaded, or an answer is longer than the limits allow.
    """
    try:
        found = lm_eval.simple_evaluate(
            model=HarnessModel(model, tasks, stops),
            tasks=list(tasks.tasks),
            task_manager=tasks.manager,
            limit=tasks.rows,
            log_samples=False,
            apply_chat_template=tasks.template is not None,
            fewshot_as_multiturn=tasks.template is not None,
        )
    except (OSError, ValueError, LookupError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"evaluate.tasks: the harness cannot run them: {reason}; correct or remove the task") from error
    return {
        name: {
            "version": found["versions"].get(name),
            "shots": found["n-shot"].get(name),
            "rows": found["n-samples"].get(name, {}).get("effective"),
            "chat_template": tasks.template is not None,
            "metrics": {metric: value for metric, value in metrics.items() if _is_number(value)},
        }
        for name, metrics in found["results"].items()
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
