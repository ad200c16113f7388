"""How each optimizer step is cut into micro-batches: changes memory, padding and speed, never what is learnt."""

from collections.abc import Iterable, Iterator
from itertools import pairwise

import numpy as np

from stages.bucket.plan import MicroBatch, Plan
from stages.bucket.steps import Index
from stages.errors import UserError
from stages.params import round_up

OVERHEAD_TOKENS = 128
"""Cost of one more micro-batch, in padded tokens.

Seconds = a + b * tokens, fitted to forward and backward of a 6-layer Llama over 10 shapes of 64 to 1,024 tokens on a
2-core CPU, gave a / b = 38 (1 thread) to 91 (2 threads). Rounded up, because accelerators waste more on small batches
(not measured) and too high costs less than too low: on log-normal chat lengths 128 where 64 is true adds 0.3% to the
cost of a run, 64 where 256 is true 2%.
"""


def cut_steps(
    steps: Iterable[tuple[int, np.ndarray]], index: Index, *, max_tokens: int, pad_multiple: int
) -> Iterator[MicroBatch]:
    """Cut steps (epoch and rows; the first holds the longest row) into micro-batches, in execution order.

    The run's first micro-batch starts with the longest row and takes as many rows as `max_tokens` allows; its padded
    tokens cap all others. So none after it is larger in padded tokens or in length: memory is flat, and running out
    of it happens at once or never. All other cuts waste the fewest padded tokens (`cheapest_cuts`); inside a step the
    largest micro-batch runs first.

    Raises:
        UserError: the longest row does not fit in `max_tokens`.
    """
    _check_fits(index.lengths, max_tokens, pad_multiple)
    return _cut_steps(steps, index, max_tokens, pad_multiple)


def _check_fits(lengths: np.ndarray, max_tokens: int, pad_multiple: int) -> None:
    """The longest row must fit in a micro-batch of its own."""
    row = int(lengths.argmax())
    length = int(lengths[row])
    padded = round_up(length, pad_multiple)
    if padded > max_tokens:
        raise UserError(
            f"bucket.max_tokens: the longest row (train row {row}: {length} tokens, padded {padded}) must fit in a "
            f"micro-batch; got {max_tokens}; raise bucket.max_tokens or lower data.max_length"
        )


def _cut_steps(
    steps: Iterable[tuple[int, np.ndarray]], index: Index, max_tokens: int, pad_multiple: int
) -> Iterator[MicroBatch]:
    """`cut_steps` once the longest row is known to fit."""
    cap_tokens = 0
    for number, (epoch, rows) in enumerate(steps):
        rows = rows[np.lexsort((rows, -index.lengths[rows]))]
        padded = -(-index.lengths[rows].astype(np.int64) // pad_multiple) * pad_multiple
        if number == 0:
            first = min(len(rows), max_tokens // int(padded[0]))
            cap_tokens = first * int(padded[0])
            starts = [0, *(first + start for start in cheapest_cuts(padded[first:], cap_tokens))]
        else:
            starts = cheapest_cuts(padded, cap_tokens)
        micro_batches = [
            MicroBatch(
                epoch=epoch,
                step=number,
                rows=rows[start:end],
                length=int(padded[start]),
                supervised=int(index.supervised[rows[start:end]].sum()),
            )
            for start, end in pairwise([*starts, len(rows)])
        ]
        yield from sorted(micro_batches, key=lambda micro_batch: (-micro_batch.padded_tokens, -micro_batch.length))


def cheapest_cuts(lengths: np.ndarray, cap_tokens: int) -> list[int]:
    """Where to cut rows, sorted by padded length descending, so that padding plus overhead is least.

    A micro-batch of rows i to j - 1 costs lengths[i] * (j - i) + OVERHEAD_TOKENS; dynamic programming over j finds the
    cheapest cut of every prefix. As lengths descend, a start that loses to a later one at j loses at every j after it,
    so the candidates only shrink from the left and the search is close to linear.

    Args:
        lengths: padded lengths, int64, descending, none above `cap_tokens`.
        cap_tokens: most padded tokens of a micro-batch.

    Returns:
        The first row of each micro-batch.
    """
    rows = len(lengths)
    last_end = (np.arange(rows) + cap_tokens // lengths).tolist()
    cost_before = [0] * (rows + 1)
    start_of = [0] * (rows + 1)
    intercepts = np.empty(rows, np.int64)
    oldest = 0
    for end in range(1, rows + 1):
        newest = end - 1
        intercepts[newest] = cost_before[newest] - int(lengths[newest]) * newest
        while last_end[oldest] < end:
            oldest += 1
        costs = intercepts[oldest:end] + lengths[oldest:end] * end
        cheapest = int(costs.argmin())
        oldest += cheapest
        start_of[end] = oldest
        cost_before[end] = int(costs[cheapest]) + OVERHEAD_TOKENS
    starts = []
    end = rows
    while end:
        end = start_of[end]
        starts.append(end)
    return starts[::-1]


def summarise(plan: Plan, lengths: np.ndarray) -> dict[str, int | float]:
    """The metrics of a plan; rounded, so that they are the same bytes on any machine."""
    micro_batches = [micro_batch for step in plan.steps for micro_batch in step]
    tokens_per_step = np.array([sum(int(lengths[batch.rows].sum()) for batch in step) for step in plan.steps])
    padded_tokens = sum(micro_batch.padded_tokens for micro_batch in micro_batches)
    return {
        "optimizer_steps": len(plan.steps),
        "micro_batches": len(micro_batches),
        "padding_percent": round(100 * (1 - int(tokens_per_step.sum()) / padded_tokens), 3),
        "max_batch_tokens": max(micro_batch.padded_tokens for micro_batch in micro_batches),
        "max_batch_rows": max(len(micro_batch.rows) for micro_batch in micro_batches),
        "max_batch_length": max(micro_batch.length for micro_batch in micro_batches),
        "tokens_per_step_mean": round(float(tokens_per_step.mean()), 2),
        "tokens_per_step_cv": round(float(tokens_per_step.std() / tokens_per_step.mean()), 4),
    }
