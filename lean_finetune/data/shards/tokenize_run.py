"""A run of tokenize: it makes the shards that are not finished, and publishes all."""

import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from pathlib import Path

from lean_finetune.config.schema import Run
from lean_finetune.core.atomic_files import repo_root, write_errors
from lean_finetune.core.errors import UserError
from lean_finetune.core.file_locks import clear, lock_directory, unlock_directory
from lean_finetune.core.progress_bar import progress_bar
from lean_finetune.data.read.row_block import BLOCK_BYTES, RowBlock
from lean_finetune.data.read.source_blocks import read_blocks
from lean_finetune.data.shards.publish_tokens import publish
from lean_finetune.data.shards.shard_files import Shard, discard_all, finished_shard, shard_of, write_shard
from lean_finetune.data.shards.tokenize_block import BlockTokenizer
from lean_finetune.data.shards.tokenize_job import TokenizeJob
from lean_finetune.data.shards.worker_pool import Result, TokenizeBlocks, available_workers, open_pool
from lean_finetune.pinning.locate import ModelFault

Notify = Callable[[str], None]


def tokenize_all(job: TokenizeJob, run: Run, out: Path, notify: Notify) -> list[str]:
    """Make all shards that are not finished, and publish the token directory; return notes.

    Raises UserError, see `make_shards` and `publish`.
    """
    # In the user's checkout, as DVC deletes a stage's outputs before it runs. Temporary experiments share it.
    with work_directory(repo_root() / "scratch" / "tokenize", job.key, notify) as root:
        return publish(job, root, _tokenize(job, run, root), out)


def _tokenize(job: TokenizeJob, run: Run, root: Path) -> list[Shard]:
    """`make_shards` with a pool of workers, a progress bar, and a refusal of the first bad row."""
    data_bytes = job.data_lock["bytes"]
    workers = max(1, min(run.data_workers or available_workers(), -(-data_bytes // BLOCK_BYTES)))
    make_tokenizer = partial(BlockTokenizer, job.settings)
    # The pool first: the thread of a progress bar would make forks unsafe.
    with (
        open_pool(job.tokenizer, make_tokenizer, workers, run.data_pool) as tokenize,
        progress_bar(total=data_bytes, desc="tokenize", unit="B", unit_scale=True, disable=not run.progress) as bar,
    ):

        def checked(blocks: Iterable[RowBlock]) -> Iterator[Result]:
            rows = tokens = 0
            for block, made in tokenize(blocks):
                if job.settings.on_bad_row == "fail" and "bad_rows" in made.tally.first:
                    bad = made.tally.rejects[-1]  # No row behind it was read.
                    raise UserError(f"{job.file_names[bad.file]}:{bad.line}: {bad.reason}")
                rows += made.tally.counts[block.source]["rows"]
                tokens += sum(len(side.rows.column("input_ids").flatten()) for side in (made.train, made.heldout))
                if seconds := bar.format_dict["elapsed"]:
                    rates = f"{rows / seconds:,.0f} rows/s, {tokens / seconds:,.0f} tokens/s"
                    bar.set_postfix_str(rates, refresh=False)
                yield block, made

        blocks = read_blocks(job.data_lock, max_rows=job.max_rows, progress=bar.update)
        made = make_shards(root, job.key, blocks, checked)
    try:
        job.tokenizer_files.refuse_change()
    except ModelFault:
        discard_all(root)
        raise
    return made


def make_shards(root: Path, key: str, blocks: Iterable[RowBlock], tokenize: TokenizeBlocks) -> list[Shard]:
    """Make the unfinished shards below `root`; return all shards in order.

    `key` is of everything that decides the bytes: a shard with another key is made again. `blocks` are all blocks of
    the data. Raises UserError if a finished shard was made from other bytes than the files have now.
    """
    shards: dict[int, Shard] = {}

    def unfinished() -> Iterator[RowBlock]:
        for number, group in groupby(blocks, key=shard_of):
            finished = finished_shard(root, number, key)
            if finished is None:
                yield from group
            else:
                _skip_blocks(root, group, finished)
                shards[number] = finished

    for number, results in groupby(tokenize(unfinished()), key=lambda result: shard_of(result[0])):
        shards[number] = write_shard(root, number, key, results)
    return [shards[number] for number in sorted(shards)]


def _skip_blocks(root: Path, group: Iterable[RowBlock], finished: Shard) -> None:
    """Read a finished shard's blocks, and compare them with its checksum."""
    count = crc = 0
    for block in group:
        count += 1
        crc = zlib.crc32(block.payload, crc)
    if (count, crc) != (finished.blocks, finished.input_crc32):
        discard_all(root)
        raise UserError(
            f"{root}: shard {finished.number} was made from other bytes than the source holds now (it was edited "
            "during an earlier run), so all finished shards were deleted; run again"
        )


@contextmanager
def work_directory(root: Path, key: str, notify: Notify) -> Iterator[Path]:
    """The directory `root/key` of unfinished work, where no other process works; it is removed when the block succeeds.

    `notify` is called before waiting for another process. After an error the directory stays if it has a finished
    shard. Directories of other keys are removed unless they are locked: they belong to other data, parameters or code.
    Raises UserError if the disk cannot be written.
    """
    directory = root / key
    with write_errors(directory):
        lock = lock_directory(
            directory, lambda: notify(f"another tokenize works in {directory}; waiting for it to end")
        )
        assert lock is not None, "lock_directory waits"
        try:
            _remove_stale(root, key)
            yield directory
            clear(directory)
        except BaseException:
            if not any((directory / "done").glob("*.json")):
                clear(directory)
            raise
        finally:
            unlock_directory(directory, lock)


def _remove_stale(root: Path, key: str) -> None:
    for other in sorted(root.iterdir()):
        if other.name != key and other.is_dir() and (lock := lock_directory(other)) is not None:
            clear(other)
            unlock_directory(other, lock)
