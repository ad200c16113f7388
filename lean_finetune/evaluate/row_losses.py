"""Compute the held-out loss of each row, so that one pass gives the total and every length bucket.

Shapes: B rows, T padded tokens, N trained tokens of a batch.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import nn

from lean_finetune.core.progress_bar import progress_bar
from lean_finetune.model.model_spec import WeightsSpec
from lean_finetune.step.batches import Batch, Row, collate
from lean_finetune.step.evaluation_limits import EvaluationLimits
from lean_finetune.step.loss import token_losses
from lean_finetune.step.token_rows import TokenRows


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


def row_losses(
    model: nn.Module,
    spec: WeightsSpec,
    rows: TokenRows,
    numbers: Sequence[int],
    limits: EvaluationLimits,
    *,
    pad_id: int,
    device: torch.device,
    progress: str | None = None,
) -> np.ndarray:
    """Return the summed cross-entropy of each row of `numbers`, in this order, float64.

    At most `limits.logits_chunk` × vocabulary logits exist at a time. `progress` is the title of a progress bar.
    """
    return row_sums(
        model,
        spec,
        rows.gather,
        rows.lengths,
        numbers,
        limits,
        token_losses,
        pad_id=pad_id,
        device=device,
        progress=progress,
    )


def row_sums(
    model: nn.Module,
    spec: WeightsSpec,
    gather: Callable[[np.ndarray], list[Row]],
    lengths: np.ndarray,
    numbers: Sequence[int],
    limits: EvaluationLimits,
    of_tokens: Callable[[nn.Module, Batch, int], torch.Tensor],
    *,
    pad_id: int,
    device: torch.device,
    progress: str | None = None,
) -> np.ndarray:
    """Return the sums of figures of trained tokens over each row of `numbers`, in this order, float64.

    Args:
        model: what computes the figures.
        spec: its method and precision.
        gather: returns tokens and trained spans of rows.
        lengths: tokens of every row.
        numbers: the rows to sum over.
        limits: on batches and logits.
        of_tokens: returns figures of shape (N, …) of a batch; its last argument is `limits.logits_chunk`.
        pad_id: token in the padding.
        device: of the model.
        progress: title of a progress bar; None = no bar.
    """
    sums: dict[int, list[float] | float] = {}
    with progress_bar(total=len(numbers), desc=progress, unit=" rows", disable=progress is None) as bar:
        for batch_numbers in batch_rows(lengths, numbers, limits.max_tokens):
            length = int(lengths[batch_numbers[0]])
            batch = collate(gather(np.array(batch_numbers)), length, pad_id)
            with torch.no_grad(), spec.autocast(device.type):
                figures_N = of_tokens(model, batch.to(device), limits.logits_chunk).double().cpu()
            sums_B = torch.zeros((len(batch_numbers), *figures_N.shape[1:]), dtype=torch.float64)
            sums_B.index_add_(0, batch.supervised_index_N // length, figures_N)
            sums.update(zip(batch_numbers, sums_B.tolist(), strict=True))
            bar.update(len(batch_numbers))
    return np.array([sums[row] for row in numbers])
