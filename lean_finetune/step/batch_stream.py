"""Load the micro-batches of a plan in order, read ahead by threads."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain, islice

import numpy as np

from cuda_memory.units import round_up
from lean_finetune.plan.batch_plan import MicroBatch, Plan
from lean_finetune.step.batches import BATCHES_AHEAD, Batch, TokenPart, read_batch
from lean_finetune.step.token_rows import TokenRows


def load(
    tokens: TokenRows,
    plan: Plan,
    *,
    start_step: int = 0,
    rank: int = 0,
    pad_id: int,
    pin_memory: bool = False,
    threads: int = 0,
    max_tokens: int | None = None,
    part: TokenPart | None = None,
) -> Generator[Batch]:
    """Yield the batches of one rank in the plan's order.

    A step's batches of rows of tokens that are not trained come before all others.

    Order and bytes do not depend on `threads`, which read ahead; with 0 each batch is made when it is needed. Nothing
    before `start_step` is read. Micro-batches of more than `max_tokens` padded tokens are split. A micro-batch without
    rows becomes a row of padding. With a `part`, batches have that part of their tokens. Close the iterator to end its
    threads early.

    Raises:
        UserError: at the batch concerned: the plan was made for other tokens, or the tokens are damaged.
    """
    own = (own_micro_batches(tokens, plan, step, rank, max_tokens) for step in range(start_step, len(plan.steps)))
    planned = chain.from_iterable(chain(_untrained(tokens, one), one) for one in own)
    read = partial(read_batch, tokens, pad_id=pad_id, pin_memory=pin_memory, part=part)
    return _read_ahead(read, planned, threads) if threads else (read(micro_batch) for micro_batch in planned)


def own_micro_batches(tokens: TokenRows, plan: Plan, step: int, rank: int, max_tokens: int | None) -> list[MicroBatch]:
    """The micro-batches of one rank in a step; micro-batches of more than `max_tokens` padded tokens are split."""
    own = [one for one in plan.steps[step] if one.rank == rank]
    return own if max_tokens is None else split_micro_batches(own, max_tokens, tokens.lengths, tokens.supervised)


def _untrained(tokens: TokenRows, own: list[MicroBatch]) -> Iterator[MicroBatch]:
    """Micro-batches of the same rows' other rows of tokens, which may need longer joined ones."""
    for one in own:
        for behind in range(1, one.kind.passes):
            rows = one.rows + behind
            length = max(one.length, int(tokens.lengths[rows].sum())) if one.flat else one.length
            yield replace(one, rows=rows, length=length, supervised=int(tokens.supervised[rows].sum()))


def _read_ahead(read: Callable[[MicroBatch], Batch], planned: Iterator[MicroBatch], threads: int) -> Generator[Batch]:
    """Make batches in threads and yield them in order."""
    waiting: deque[Future[Batch]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="loader") as pool:
        try:
            for micro_batch in planned:
                waiting.append(pool.submit(read, micro_batch))
                if len(waiting) > threads * BATCHES_AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            # Else the pool would make all batches that were asked for before it ends.
            for future in waiting:
                future.cancel()


class BatchStream:
    """The batches of one process, step by step in order. Close it to end its reader threads."""

    def __init__(
        self,
        rows: TokenRows,
        plan: Plan,
        *,
        start_step: int,
        rank: int,
        pad_id: int,
        pin_memory: bool,
        threads: int,
        part: TokenPart | None = None,
    ):
        """Start reading ahead at a step; arguments as `load`."""
        self._rows, self._plan, self._rank = rows, plan, rank
        self._load = partial(
            load, rows, plan, rank=rank, pad_id=pad_id, pin_memory=pin_memory, threads=threads, part=part
        )
        self._batches: Generator[Batch] = self._load(start_step=start_step)
        self._max_tokens: int | None = None

    def step(self, step: int) -> tuple[list[MicroBatch], Iterator[Batch]]:
        """Return this process's micro-batches of the next step, and an iterator over their tensors.

        Batches of rows of tokens that are not trained come before them.

        Raises:
            UserError: from the iterator: the plan was made for other tokens, or the token files are damaged.
        """
        micro_batches = own_micro_batches(self._rows, self._plan, step, self._rank, self._max_tokens)
        return micro_batches, islice(self._batches, len(micro_batches) * self._plan.kind.passes)

    def split(self, step: int, max_tokens: int) -> None:
        """Restart at `step` with at most `max_tokens` padded tokens in a micro-batch of several rows.

        This applies to all later steps: their micro-batches are as large and would fail first.
        """
        # What was read ahead has the old sizes.
        self._batches.close()
        self._max_tokens = max_tokens
        self._batches = self._load(start_step=step, max_tokens=max_tokens)

    def close(self) -> None:
        """End the reader threads."""
        self._batches.close()


def split_micro_batches(
    micro_batches: Iterable[MicroBatch], max_tokens: int, lengths: np.ndarray, supervised: np.ndarray
) -> list[MicroBatch]:
    """Halve micro-batches until each has at most `max_tokens` padded tokens or a single row, or pair of rows.

    Rows keep their order. Halves of a padded micro-batch keep its length; halves of packed rows have no padding.
    `lengths` and `supervised` are the tokens and trained tokens of every training row.
    """
    found: list[MicroBatch] = []
    for one in micro_batches:
        if one.padded_tokens <= max_tokens or len(one.rows) < 2 * one.kind.unit:
            found.append(one)
        else:
            found += split_micro_batches(_halves(one, lengths, supervised), max_tokens, lengths, supervised)
    return found


def _halves(one: MicroBatch, lengths: np.ndarray, supervised: np.ndarray) -> list[MicroBatch]:
    """Two micro-batches with the rows of one; packed rows are split in the middle of their tokens."""
    middle = (len(one.rows) + 1) // 2
    if one.flat:
        tokens = np.cumsum(lengths[one.rows])
        middle = min(int(np.searchsorted(tokens, tokens[-1] / 2)) + 1, len(one.rows) - 1)
    middle = min(round_up(middle, one.kind.unit), len(one.rows) - one.kind.unit)
    return [
        replace(
            one,
            rows=one.rows[half],
            length=int(lengths[one.rows[half]].sum()) if one.flat else one.length,
            supervised=int(supervised[one.rows[half]].sum()),
            images=one.images[half],
        )
        for half in (slice(middle), slice(middle, None))
    ]
