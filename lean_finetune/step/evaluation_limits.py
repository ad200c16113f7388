"""What bounds the memory of an evaluation: section `evaluate` of params.yaml, no larger than training's where blank."""

from dataclasses import dataclass

from lean_finetune.config.schema import Params


@dataclass(frozen=True, kw_only=True)
class EvaluationLimits:
    """How much of an evaluation is in memory at once."""

    max_tokens: int
    """Padded tokens in a batch: of rows whose loss is taken, or of prompts with their longest answers."""
    logits_chunk: int
    """Tokens whose logits exist at once."""
    max_new_tokens: int
    """Longest answer."""
    generate_batch_rows: int
    """Most prompts in a batch."""

    @classmethod
    def from_params(cls, params: Params) -> "EvaluationLimits":
        """Blank: the tokens of training's micro-batches, and the logits of its loss."""
        asked, in_training, chunk = params.evaluate, params.bucket.max_tokens, params.train.loss_chunk
        max_tokens = asked.max_tokens or in_training
        return cls(
            max_tokens=max_tokens,
            logits_chunk=asked.logits_chunk or chunk or max_tokens,
            max_new_tokens=asked.max_new_tokens,
            generate_batch_rows=asked.generate_batch_rows,
        )

    def prompts_at_once(self, prompt_tokens: int) -> int:
        """Prompts answered together, of which the longest has so many tokens; one longer than all stands alone."""
        return min(self.generate_batch_rows, max(1, self.max_tokens // (prompt_tokens + self.max_new_tokens)))
