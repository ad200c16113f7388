"""Runs of tokenize: all shards, one part of them on each of several machines, or the merge of such parts."""

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path

from tqdm import tqdm

from lean_finetune.core.errors import UserError
from lean_finetune.data.read.row_block import BLOCK_BYTES, RowBlock
from lean_finetune.data.read.source_blocks import read_blocks
from lean_finetune.data.read.worker_memory import return_freed_memory
from lean_finetune.data.shards.block_tokens import BlockTokens
from lean_finetune.data.shards.merge_shards import LocatedShard
from lean_finetune.data.shards.parts import MANIFEST, TokenizePart, collect, write_manifest
from lean_finetune.data.shards.publish_tokens import TokenizerMeta, publish
from lean_finetune.data.shards.shard_files import Shard, ShardWriter, discard_all, finished_shard, shard_of
from lean_finetune.data.shards.tokenize_block import BlockTokenizer
from lean_finetune.data.shards.tokenize_job import TokenizeJob
from lean_finetune.data.shards.unfinished_work import locked_directory, scratch_root, work_directory
from lean_finetune.data.shards.worker_pool import Pool, available_workers, open_pool

Notify = Callable[[str], None]
ALL_SHARDS = TokenizePart(number=0, of=1)


@dataclass(frozen=True, kw_only=True)
class TokenizeRun:
    """A job, and how it runs on this machine, which changes no byte of the result."""

    job: TokenizeJob
    workers: int | None
    """None: one for each core that this process may use."""
    pool: str
    progress: bool

    def worker_count(self) -> int:
        """Workers to start, at most one for each block."""
        blocks = -(-self.job.data_lock["bytes"] // BLOCK_BYTES)
        return max(1, min(self.workers or available_workers(), blocks))


def tokenize_all(run: TokenizeRun, out: Path, notify: Notify) -> list[str]:
    """Make all shards that are not finished, and publish the token directory; return notes.

    Raises:
        UserError: see `make_shards` and `publish`.
    """
    job = run.job
    with work_directory(scratch_root(), job.key, notify) as root:
        shards, _, tokenizer = _make_shards(run, root, ALL_SHARDS)
        notes = publish(job, tokenizer, [LocatedShard(root=root, shard=shard) for shard in shards], out)
    return [job.engine_note(), *notes]


def tokenize_part(run: TokenizeRun, part: TokenizePart, out: Path, notify: Notify) -> list[str]:
    """Make one part's shards and its manifest below `out`; return notes.

    Raises:
        UserError: see `make_shards`.
    """
    job, root = run.job, part.directory(out)
    with locked_directory(root, notify):
        # The manifest vouches for finished parts only.
        (root / MANIFEST).unlink(missing_ok=True)
        shards, all_shards, tokenizer = _make_shards(run, root, part)
        write_manifest(root, part, job.inputs, job.key, shards, all_shards)
    return [job.engine_note(), *job.notes(), *tokenizer.notes(), f"{len(shards)} of {all_shards} shards are in {root}"]


def merge_parts(run: TokenizeRun, directories: Sequence[Path], out: Path) -> list[str]:
    """Publish the token directory from parts made by `tokenize_part`; return notes.

    Raises:
        UserError: see `collect` and `publish`.
    """
    job = run.job
    shards = collect(directories, job.inputs, job.key)
    block_tokenizer = BlockTokenizer(job.settings, job.loaded)
    return publish(job, TokenizerMeta.of(block_tokenizer, job.has_conversations), shards, out)


def _make_shards(run: TokenizeRun, root: Path, part: TokenizePart) -> tuple[list[Shard], int, TokenizerMeta]:
    """(the part's shards, the number of all shards, what meta.json says of the tokenizer)."""
    job = run.job
    return_freed_memory()
    block_tokenizer = BlockTokenizer(job.settings, job.loaded)
    meta = TokenizerMeta.of(block_tokenizer, job.has_conversations)
    # The pool first: the thread of a progress bar would make forks unsafe.
    with (
        open_pool(block_tokenizer, partial(BlockTokenizer, job.settings), run.worker_count(), run.pool) as pool,
        _Progress(job.data_lock["bytes"], run.progress) as progress,
    ):
        blocks = read_blocks(job.data_lock, max_rows=job.max_rows, progress=progress.read)
        shards, all_shards = make_shards(
            root, job.key, part, blocks, pool, job.file_names, job.settings.on_bad_row == "fail", progress.tokenized
        )
    return shards, all_shards, meta


def make_shards(
    root: Path,
    key: str,
    part: TokenizePart,
    blocks: Iterable[RowBlock],
    pool: Pool,
    file_names: Sequence[str],
    fails_on_bad_row: bool,
    on_tokenized: Callable[[BlockTokens], object],
) -> tuple[list[Shard], int]:
    """Make the part's unfinished shards; return all its shards in order, and the number of shards of all parts.

    Args:
        root: directory of the shards.
        key: of everything that decides the bytes; a shard with another key is made again.
        part: which shards to make.
        blocks: all blocks of the data.
        pool: tokenizes them.
        file_names: by `RowBlock.file`.
        fails_on_bad_row: whether a bad row ends the run.
        on_tokenized: called with the tokens of each block.

    Raises:
        UserError: a row cannot be used, or a finished shard was made from other bytes than the files have now.
    """
    shards: dict[int, Shard | None] = {}

    def unfinished() -> Iterator[RowBlock]:
        for number, group in groupby(blocks, key=shard_of):
            finished = finished_shard(root, number, key) if part.includes(number) else None
            shards[number] = finished
            if part.includes(number) and finished is None:
                yield from group
            else:
                _skip_blocks(root, group, finished)

    for number, results in groupby(pool.map(unfinished()), key=lambda result: shard_of(result[0])):
        with ShardWriter(root, number, key) as writer:
            for block, tokens in results:
                if fails_on_bad_row and tokens.counts.get("bad_rows"):
                    row, line = tokens.first["bad_rows"]
                    fault = next(reason for rejected, _, reason in tokens.rejects if rejected == row)
                    raise UserError(f"{file_names[block.file]}:{line}: {fault}")
                writer.add(block, tokens)
                on_tokenized(tokens)
            shards[number] = writer.finish()
    return [shard for _, shard in sorted(shards.items()) if shard is not None], len(shards)


def _skip_blocks(root: Path, group: Iterable[RowBlock], finished: Shard | None) -> None:
    """Read a shard's blocks, and compare them with the checksum of the finished shard where there is one."""
    count = crc = 0
    for block in group:
        count += 1
        if finished is not None:
            crc = zlib.crc32(block.payload, crc)
    if finished is not None and (count, crc) != (finished.blocks, finished.input_crc32):
        discard_all(root)
        raise UserError(
            f"{root}: shard {finished.number} was made from other bytes than the source holds now (it was edited "
            "during an earlier run), so all finished shards were deleted; run again"
        )


class _Progress:
    """A progress bar of the bytes read, with rows and tokens per second."""

    def __init__(self, total_bytes: int, shown: bool):
        self._bar = tqdm(total=total_bytes, desc="tokenize", unit="B", unit_scale=True, disable=not shown)
        self._rows = self._tokens = 0

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def read(self, size_bytes: int) -> None:
        self._bar.update(size_bytes)

    def tokenized(self, tokens: BlockTokens) -> None:
        self._rows += tokens.counts["rows"]
        self._tokens += sum(len(rows.column("input_ids").flatten()) for rows in (tokens.train, tokens.heldout))
        seconds = self._bar.format_dict["elapsed"]
        if seconds:
            rates = f"{self._rows / seconds:,.0f} rows/s, {self._tokens / seconds:,.0f} tokens/s"
            self._bar.set_postfix_str(rates, refresh=False)
