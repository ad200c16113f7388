"""The micro-batches of each step and their tensors: as planned, until memory ends; then cut smaller."""

from collections.abc import Generator, Iterator
from functools import partial
from itertools import islice

from lean_finetune.plan.batch_plan import MicroBatch, Plan
from lean_finetune.plan.split_step import split_micro_batches
from lean_finetune.step.batch_loader import load
from lean_finetune.step.batches import Batch
from lean_finetune.step.token_rows import TokenRows


class Feed:
    """What one process of a run passes through its model. Steps are asked for in order; close it to end its threads."""

    def __init__(
        self, rows: TokenRows, plan: Plan, *, start_step: int, rank: int, pad_id: int, pin_memory: bool, threads: int
    ):
        """Read ahead from a step on; arguments as `load`."""
        self._rows, self._plan, self._rank = rows, plan, rank
        self._load = partial(load, rows, plan, rank=rank, pad_id=pad_id, pin_memory=pin_memory, threads=threads)
        self._stream: Generator[Batch] = self._load(start_step=start_step)
        self._max_tokens: int | None = None

    def step(self, step: int) -> tuple[list[MicroBatch], Iterator[Batch]]:
        """This process's micro-batches of the next step, and their tensors, each made before it is asked for.

        Raises:
            UserError: while tensors are taken: the plan was made for other tokens, or the tokens are damaged.
        """
        micro_batches = [one for one in self._plan.steps[step] if one.rank == self._rank]
        if self._max_tokens is not None:
            micro_batches = split_micro_batches(
                micro_batches, self._max_tokens, self._rows.lengths, self._rows.supervised
            )
        return micro_batches, islice(self._stream, len(micro_batches))

    def cut(self, step: int, max_tokens: int) -> None:
        """From `step` on, which is given out once more, let no micro-batch of several rows have more padded tokens.

        Later steps too: they have micro-batches of the same size, and each of those would fail first.
        """
        self._stream.close()
        self._max_tokens = max_tokens
        self._stream = self._load(start_step=step, max_tokens=max_tokens)

    def close(self) -> None:
        """End the threads."""
        self._stream.close()
