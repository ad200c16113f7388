"""Load the micro-batches of a plan in order, read ahead by threads."""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain, islice

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
    part: TokenPart | None = None,
) -> Generator[Batch]:
    """Yield the batches of one rank in the plan's order.

    A step's batches of rows of tokens that are not trained come before all others.

    Order and bytes do not depend on `threads`, which read ahead; with 0 each batch is made when it is needed. Nothing
    before `start_step` is read. A micro-batch without rows becomes a row of padding. With a `part`, batches have that
    part of their tokens. Close the iterator to end its threads early.

    Raises:
        UserError: at the batch concerned: the plan was made for other tokens, or the tokens are damaged.
    """
    own = (own_micro_batches(plan, step, rank) for step in range(start_step, len(plan.steps)))
    planned = chain.from_iterable(chain(_untrained(tokens, one), one) for one in own)
    read = partial(read_batch, tokens, pad_id=pad_id, pin_memory=pin_memory, part=part)
    return _read_ahead(read, planned, threads) if threads else (read(micro_batch) for micro_batch in planned)


def own_micro_batches(plan: Plan, step: int, rank: int) -> list[MicroBatch]:
    """The micro-batches of one rank in a step."""
    return [one for one in plan.steps[step] if one.rank == rank]


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
        self._plan, self._rank = plan, rank
        self._batches = load(
            rows,
            plan,
            start_step=start_step,
            rank=rank,
            pad_id=pad_id,
            pin_memory=pin_memory,
            threads=threads,
            part=part,
        )

    def step(self, step: int) -> tuple[list[MicroBatch], Iterator[Batch]]:
        """Return this process's micro-batches of the next step, and an iterator over their tensors.

        Batches of rows of tokens that are not trained come before them.

        Raises:
            UserError: from the iterator: the plan was made for other tokens, or the token files are damaged.
        """
        micro_batches = own_micro_batches(self._plan, step, self._rank)
        return micro_batches, islice(self._batches, len(micro_batches) * self._plan.kind.passes)

    def close(self) -> None:
        """End the reader threads."""
        self._batches.close()
