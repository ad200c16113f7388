"""Blocks into shards: the unfinished ones are tokenized, the finished ones read past."""

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from lean_finetune.core.errors import UserError
from lean_finetune.data.format.token_settings import BlockTokens
from lean_finetune.data.read.row_block import Block
from lean_finetune.data.shards.shard_files import Shard, ShardWriter, discard_all, finished_shard, shard_of
from lean_finetune.data.shards.worker_pool import Pool


@dataclass(frozen=True, kw_only=True)
class Task:
    """Which shards are to be made, and where."""

    root: Path
    key: str
    """Of all that decides the bytes; a shard of another key is made anew."""
    part: int
    parts: int
    """Only shards whose number leaves `part` when divided by `parts` are made."""

    def wants(self, number: int) -> bool:
        """Whether a shard is this task's to make."""
        return number % self.parts == self.part


def make_shards(
    task: Task,
    blocks: Iterable[Block],
    pool: Pool,
    file_names: Sequence[str],
    fails_on_bad_row: bool,
    made: Callable[[BlockTokens], object],
) -> tuple[list[Shard], int]:
    """Make the task's shards; return them in order, and the number of shards that the whole source has.

    `made` is told what became of each block that was tokenized.

    Raises:
        UserError: a row cannot be used, or a finished shard was made from other bytes than the source now holds.
    """
    shards: dict[int, Shard | None] = {}
    for number, results in groupby(pool.map(_unfinished(task, blocks, shards)), key=lambda result: shard_of(result[0])):
        with ShardWriter(task.root, number, task.key) as writer:
            for block, tokens in results:
                if fails_on_bad_row and tokens.counts.get("bad_rows"):
                    raise UserError(_first_fault(block, tokens, file_names))
                writer.add(block, tokens)
                made(tokens)
            shards[number] = writer.finish()
    return [shard for _, shard in sorted(shards.items()) if shard is not None], len(shards)


def _unfinished(task: Task, blocks: Iterable[Block], shards: dict[int, Shard | None]) -> Iterator[Block]:
    """The blocks that are still to be tokenized; `shards` gets every shard's number, with the finished ones."""
    for number, group in groupby(blocks, key=shard_of):
        finished = finished_shard(task.root, number, task.key) if task.wants(number) else None
        shards[number] = finished
        if task.wants(number) and finished is None:
            yield from group
        else:
            _read_past(task, group, finished)


def _read_past(task: Task, group: Iterable[Block], finished: Shard | None) -> None:
    """Read a shard's blocks without tokenizing them, and hold a finished shard to their bytes."""
    count = crc = 0
    for block in group:
        count += 1
        if finished is not None:
            crc = zlib.crc32(block.payload, crc)
    if finished is not None and (count, crc) != (finished.blocks, finished.input_crc32):
        discard_all(task.root)
        raise UserError(
            f"{task.root}: shard {finished.number} was made from other bytes than the source holds now (it was edited "
            "during an earlier run), so all finished shards have been thrown away; run again"
        )


def _first_fault(block: Block, tokens: BlockTokens, file_names: Sequence[str]) -> str:
    """file:line of a block's first bad row, and what is wrong with it."""
    row, line = tokens.first["bad_rows"]
    reason = next(reason for number, _, reason in tokens.rejects if number == row)
    return f"{file_names[block.file]}:{line}: {reason}"
