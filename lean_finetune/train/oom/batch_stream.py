"""Stream the micro-batches of each step and their tensors; after an out-of-memory error, in smaller micro-batches."""

from collections.abc import Generator, Iterator
from functools import partial
from itertools import islice

from lean_finetune.plan.batch_plan import MicroBatch, Plan
from lean_finetune.plan.split_step import split_micro_batches
from lean_finetune.step.batch_loader import load
from lean_finetune.step.batches import Batch
from lean_finetune.step.token_rows import TokenRows


class BatchStream:
    """The batches of one process, step by step in order. Close it to end its reader threads."""

    def __init__(
        self, rows: TokenRows, plan: Plan, *, start_step: int, rank: int, pad_id: int, pin_memory: bool, threads: int
    ):
        """Start reading ahead at a step; arguments as `load`."""
        self._rows, self._plan, self._rank = rows, plan, rank
        self._load = partial(load, rows, plan, rank=rank, pad_id=pad_id, pin_memory=pin_memory, threads=threads)
        self._batches: Generator[Batch] = self._load(start_step=start_step)
        self._max_tokens: int | None = None

    def step(self, step: int) -> tuple[list[MicroBatch], Iterator[Batch]]:
        """Return this process's micro-batches of the next step, and an iterator over their tensors.

        Raises:
            UserError: from the iterator: the plan was made for other tokens, or the token files are damaged.
        """
        micro_batches = [one for one in self._plan.steps[step] if one.rank == self._rank]
        if self._max_tokens is not None:
            micro_batches = split_micro_batches(
                micro_batches, self._max_tokens, self._rows.lengths, self._rows.supervised
            )
        return micro_batches, islice(self._batches, len(micro_batches))

    def split(self, step: int, max_tokens: int) -> None:
        """Restart at `step` with at most `max_tokens` padded tokens in a micro-batch of several rows.

        This applies to all later steps: their micro-batches are as large and would fail first.
        """
        self._batches.close()
        self._max_tokens = max_tokens
        self._batches = self._load(start_step=step, max_tokens=max_tokens)

    def close(self) -> None:
        """End the reader threads."""
        self._batches.close()
