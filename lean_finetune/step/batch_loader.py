"""Load the micro-batches of a plan in order, read ahead by threads."""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import chain

from lean_finetune.plan.batch_plan import MicroBatch, Plan
from lean_finetune.plan.bucketed import split_micro_batches
from lean_finetune.step.batches import Batch, TokenPart, read_batch
from lean_finetune.step.token_rows import TokenRows

BATCHES_AHEAD = 2
"""Batches in flight per thread: one in the making and one ready. Each takes about 100 bytes of RAM per token."""


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

    Order and bytes do not depend on `threads`, which read ahead; with 0 each batch is made when it is needed. Nothing
    before `start_step` is read. Micro-batches of more than `max_tokens` padded tokens are split. A micro-batch without
    rows becomes a row of padding. With a `part`, batches have that part of their tokens. Close the iterator to end its
    threads early.

    Raises:
        UserError: at the batch concerned: the plan was made for other tokens, or the tokens are damaged.
    """
    steps = range(start_step, len(plan.steps))
    planned = chain.from_iterable(own_micro_batches(tokens, plan, step, rank, max_tokens) for step in steps)
    read = partial(read_batch, tokens, pad_id=pad_id, pin_memory=pin_memory, part=part)
    return _read_ahead(read, planned, threads) if threads else (read(micro_batch) for micro_batch in planned)


def own_micro_batches(tokens: TokenRows, plan: Plan, step: int, rank: int, max_tokens: int | None) -> list[MicroBatch]:
    """The micro-batches of one rank in a step; micro-batches of more than `max_tokens` padded tokens are split."""
    own = [one for one in plan.steps[step] if one.rank == rank]
    return own if max_tokens is None else split_micro_batches(own, max_tokens, tokens.lengths, tokens.supervised)


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
            for future in waiting:
                future.cancel()
