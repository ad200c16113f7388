"""Tokenize as one run, as a part of one, or from parts: the order of work, and its progress."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tqdm import tqdm

from lean_finetune.data.format.token_settings import BlockTokens
from lean_finetune.data.read.source_blocks import BLOCK_BYTES, read_blocks
from lean_finetune.data.read.worker_memory import keep_memory_small
from lean_finetune.data.shards.make_shards import Task, make_shards
from lean_finetune.data.shards.merge_shards import Placed
from lean_finetune.data.shards.parts import MANIFEST, Part, collect, write_manifest
from lean_finetune.data.shards.prepare import Job
from lean_finetune.data.shards.publish_tokens import About, publish
from lean_finetune.data.shards.shard_files import Shard
from lean_finetune.data.shards.tokenize_block import BlockTokenizer
from lean_finetune.data.shards.unfinished_work import held_alone, scratch_root, workplace
from lean_finetune.data.shards.worker_pool import available_workers, open_pool

Told = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Work:
    """A job, and how it is to be done, which changes no byte."""

    job: Job
    workers: int | None
    """None: one for each core that this process may use."""
    pool: str
    progress: bool

    def worker_count(self) -> int:
        """Workers, but no more than there are blocks."""
        blocks = -(-self.job.data_lock["bytes"] // BLOCK_BYTES)
        return max(1, min(self.workers or available_workers(), blocks))


def make_all(work: Work, out: Path, told: Told) -> list[str]:
    """Make every shard that is not finished yet, and publish the token directory; return notes.

    Raises:
        UserError: see `make_shards` and `publish`.
    """
    job = work.job
    with workplace(scratch_root(), job.key, told) as root:
        shards, _, about = _make(work, Task(root=root, key=job.key, part=0, parts=1))
        notes = publish(job, about, [Placed(root=root, shard=shard) for shard in shards], out)
    return [job.engine_note(), *notes]


def make_part(work: Work, part: Part, out: Path, told: Told) -> list[str]:
    """Make one part's shards below `out`, with a manifest; return notes.

    Raises:
        UserError: see `make_shards`.
    """
    job, root = work.job, part.directory(out)
    with held_alone(root, told):
        # While the part is being made, no manifest may vouch for it.
        (root / MANIFEST).unlink(missing_ok=True)
        shards, all_shards, about = _make(work, Task(root=root, key=job.key, part=part.number, parts=part.of))
        write_manifest(root, part, job.made_of, job.key, shards, all_shards)
    return [job.engine_note(), *job.notes(), *about.notes(), f"{len(shards)} of {all_shards} shards are in {root}"]


def merge_parts(work: Work, directories: Sequence[Path], out: Path) -> list[str]:
    """Publish the token directory from parts made elsewhere; return notes.

    Raises:
        UserError: see `collect` and `publish`.
    """
    job = work.job
    placed = collect(directories, job.made_of, job.key)
    return publish(job, About.of(BlockTokenizer(job.settings, job.opened), job.has_conversations), placed, out)


def _make(work: Work, task: Task) -> tuple[list[Shard], int, About]:
    """The task's shards, the number of shards of the whole source, and what is told of the tokenizer."""
    job = work.job
    keep_memory_small()
    own = BlockTokenizer(job.settings, job.opened)
    about = About.of(own, job.has_conversations)
    # The workers come before the bar, whose thread would make forking them unsafe.
    with (
        open_pool(own, partial(BlockTokenizer, job.settings), work.worker_count(), work.pool) as pool,
        _Progress(job.data_lock["bytes"], work.progress) as progress,
    ):
        blocks = read_blocks(job.data_lock, max_rows=job.max_rows, progress=progress.read)
        fails = job.settings.on_bad_row == "fail"
        shards, all_shards = make_shards(task, blocks, pool, job.file_names, fails, progress.tokenized)
    return shards, all_shards, about


class _Progress:
    """A bar of the source's bytes, with the rows and tokens per second."""

    def __init__(self, total_bytes: int, shown: bool):
        self._bar = tqdm(total=total_bytes, desc="tokenize", unit="B", unit_scale=True, disable=not shown)
        self._rows = self._tokens = 0

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def read(self, size_bytes: int) -> None:
        """Count bytes that were read."""
        self._bar.update(size_bytes)

    def tokenized(self, tokens: BlockTokens) -> None:
        """Count a block's rows and tokens."""
        self._rows += tokens.counts["rows"]
        self._tokens += sum(len(rows.column("input_ids").flatten()) for rows in (tokens.train, tokens.heldout))
        seconds = self._bar.format_dict["elapsed"]
        if seconds:
            rates = f"{self._rows / seconds:,.0f} rows/s, {self._tokens / seconds:,.0f} tokens/s"
            self._bar.set_postfix_str(rates, refresh=False)
