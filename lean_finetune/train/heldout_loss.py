"""Compute the held-out loss during training, on a fixed set of rows in batches no larger than training's."""

from collections.abc import Iterator
from functools import partial
from itertools import islice

import torch

from cuda_memory.units import round_up
from lean_finetune.config.schema import Train
from lean_finetune.model.precision import autocast
from lean_finetune.step.batches import Batch, TokenPart, collate, idle_batch, part_of
from lean_finetune.step.data_parallel import DataParallelModel
from lean_finetune.step.loss import summed_loss
from lean_finetune.step.token_rows import TokenRows


def heldout_batches(
    rows: TokenRows,
    count: int,
    max_tokens: int,
    pad_id: int,
    *,
    pin_memory: bool = False,
    part: TokenPart | None = None,
) -> Iterator[Batch]:
    """Yield the first `count` held-out rows, sorted by length, in batches of at most `max_tokens` padded tokens.

    A row longer than `max_tokens` is a batch by itself. With a `part`, batches have that part of their tokens.
    """
    numbers = sorted(rows.used[:count].tolist(), key=lambda row: (rows.lengths[row], row))
    start = 0
    for end in range(1, len(numbers) + 1):
        longest_next = rows.lengths[numbers[min(end, len(numbers) - 1)]]
        if end == len(numbers) or (end - start + 1) * longest_next > max_tokens:
            batch = [(rows.ids(row), rows.spans(row)) for row in numbers[start:end]]
            longest = len(batch[-1][0])
            if part is None:
                yield collate(batch, longest, pad_id, pin_memory=pin_memory)
            else:
                yield part_of(collate(batch, round_up(longest, part.parts), pad_id), part, pin_memory=pin_memory)
            start = end


@torch.no_grad()
def heldout_loss(
    parallel: DataParallelModel,
    batches: Iterator[Batch],
    pad_id: int,
    train: Train,
    chunk: int | None,
    device: torch.device,
    part: TokenPart | None = None,
) -> float:
    """Return the mean cross-entropy per trained token over held-out batches, without dropout.

    All processes call this with all batches; each computes those of its index in dimension `data` of the layout.
    """
    parallel.model.eval()
    summed = torch.zeros((), dtype=torch.float64, device=device)  # Read once: each read waits for the GPU.
    tokens = 0
    with autocast(train, device.type):
        while group := list(islice(batches, parallel.layout.data)):
            batch = group[parallel.place.data] if parallel.place.data < len(group) else idle_batch(pad_id, part)
            loss = parallel.run(partial(summed_loss, batch=batch.to(device), chunk=chunk, exchange=parallel.exchange))
            if parallel.computes_loss:
                summed += loss
                tokens += len(batch.supervised_index_N)
    parallel.model.train()
    total, count = parallel.sum_over_ranks(torch.stack([summed, torch.full_like(summed, tokens)])).tolist()
    return total / count
