"""Compute the held-out loss of each row, so that one pass gives the total and every length bucket.

Shapes: B rows, T padded tokens, N trained tokens of a batch.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import nn

from lean_finetune.config.train_schema import BaseWeights
from lean_finetune.core.progress_bar import progress_bar
from lean_finetune.model.precision import autocast
from lean_finetune.step.batches import Batch, Row, collate
from lean_finetune.step.evaluation_limits import EvaluationLimits
from lean_finetune.step.loss import token_losses


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
    gather: Callable[[np.ndarray], list[Row]],
    lengths: np.ndarray,
    numbers: Sequence[int],
    limits: EvaluationLimits,
    *,
    pad_id: int,
    device: torch.device,
    progress: str | None = None,
    of_tokens: Callable[[nn.Module, Batch, int], torch.Tensor] = token_losses,
) -> np.ndarray:
    """Return the sum of the trained tokens' cross-entropy in each row of `numbers`, in this order, float64.

    `gather` returns tokens and trained spans of rows, `lengths` are the tokens of all rows, and `progress` is the title
    of a progress bar. `of_tokens` may return other figures of a batch, of shape (N, …); its last argument is
    `limits.logits_chunk`, the number of trained tokens whose logits exist at a time.
    """
    sums: dict[int, list[float] | float] = {}
    with progress_bar(total=len(numbers), desc=progress, unit=" rows", disable=progress is None) as bar:
        for batch_numbers in batch_rows(lengths, numbers, limits.max_tokens):
            length = int(lengths[batch_numbers[0]])
            batch = collate(gather(np.array(batch_numbers)), length, pad_id)
            with torch.no_grad(), autocast(weights, device.type):
                figures_N = of_tokens(model, batch.to(device), limits.logits_chunk).double().cpu()
            sums_B = torch.zeros((len(batch_numbers), *figures_N.shape[1:]), dtype=torch.float64)
            sums_B.index_add_(0, batch.supervised_index_N // length, figures_N)
            sums.update(zip(batch_numbers, sums_B.tolist(), strict=True))
            bar.update(len(batch_numbers))
    return np.array([sums[row] for row in numbers])
