"""How much stages evaluate and reference compute at once, which limits their memory."""

from dataclasses import dataclass

import numpy as np

from lean_finetune.config.schema import Params

LOGITS_CHUNK = 128
"""Tokens whose logits exist at a time in stage reference. Fixed, like the rows of a batch there, so that no memory
switch reruns the stage."""
ROWS_OF_LONGEST = 2
"""A batch of stage reference has as many padded tokens as two of the longest rows: what the longest pair takes in
training, which also stores its activations."""


MOST_NEW_TOKENS = 256
"""Longest answer that is generated unless evaluate.max_new_tokens says more: some 190 words show how a model answers,
and a base model that never stops takes four times as long as with 64."""


@dataclass(frozen=True, kw_only=True)
class EvaluationLimits:
    """How much an evaluation computes at once, by section `evaluate` of params.yaml."""

    max_tokens: int
    """Padded tokens of a batch: rows for the loss, or prompts with their longest answers."""
    logits_chunk: int
    """Tokens whose logits exist at once."""
    max_new_tokens: int
    """Longest answer."""
    generate_batch_rows: int
    """Most prompts in a batch."""

    @classmethod
    def from_params(cls, params: Params, heldout_supervised: np.ndarray) -> "EvaluationLimits":
        """Read section `evaluate`; blank values are bucket.max_tokens, train.loss_chunk, and the longest answer.

        `heldout_supervised`: trained tokens of every held-out row, of which its own answer has no more.
        """
        evaluate = params.evaluate
        max_tokens = evaluate.max_tokens or params.bucket.max_tokens
        return cls(
            max_tokens=max_tokens,
            logits_chunk=evaluate.logits_chunk or params.train.loss_chunk or max_tokens,
            max_new_tokens=evaluate.max_new_tokens or _longest_answer(heldout_supervised),
            generate_batch_rows=evaluate.generate_batch_rows,
        )

    def prompts_at_once(self, prompt_tokens: int) -> int:
        """Prompts in a batch whose longest prompt has `prompt_tokens` tokens; at least one."""
        return min(self.generate_batch_rows, max(1, self.max_tokens // (prompt_tokens + self.max_new_tokens)))


def _longest_answer(heldout_supervised: np.ndarray) -> int:
    """Tokens of the longest held-out answer, up to `MOST_NEW_TOKENS`; these where no row is held out."""
    return min(int(heldout_supervised.max(initial=0)) or MOST_NEW_TOKENS, MOST_NEW_TOKENS)
