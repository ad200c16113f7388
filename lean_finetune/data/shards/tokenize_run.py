"""A run of tokenize: make the shards that are not finished, and publish the token directory in one atomic step."""

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from cuda_memory.units import counted
from lean_finetune.config.data_schema import HELDOUT_SOURCE
from lean_finetune.config.schema import Run
from lean_finetune.core.atomic_files import (
    FIGURES,
    atomic_directory,
    repo_root,
    sha256_json,
    write_csv,
    write_errors,
    write_sealed,
    write_text,
)
from lean_finetune.core.errors import UserError
from lean_finetune.core.file_locks import clear, lock_directory, unlock_directory
from lean_finetune.core.progress import progress_bar
from lean_finetune.data.read.row_block import BLOCK_BYTES, RowBlock
from lean_finetune.data.read.source_blocks import read_blocks
from lean_finetune.data.shards.shard_files import (
    Shard,
    SourceTotals,
    Totals,
    discard_all,
    finished_shard,
    merge,
    shard_of,
    write_shard,
)
from lean_finetune.data.shards.tally import MAX_UNREAD_COLUMNS
from lean_finetune.data.shards.tokenize_block import BlockTokenizer
from lean_finetune.data.shards.tokenize_job import TokenizeJob
from lean_finetune.data.shards.worker_pool import Result, TokenizeBlocks, available_workers, open_pool
from lean_finetune.islands.columns import COLUMNS
from lean_finetune.pinning.locate import CHAT_TEMPLATE

SCHEMA = 2
HISTOGRAM_BINS = 50
LEFT_OUT = ("bad_rows", "empty_answer_rows", "dropped_long_rows", "no_answer_rows")
"""Counts of rows that later stages do not get, beside those whose values are cut."""
# Equal for every engine, number of workers and machine.
REPORTED = (
    *("rows", "bad_rows", "empty_answer_rows", "truncated_rows", "dropped_long_rows", "split_rows", "no_answer_rows"),
    *("control_tokens_as_text", "surrogates_replaced", "sampled_rows", "sampled_rows_differing"),
)

NOTES = {
    "bad_rows": "{share} were left out because they cannot be used{first}; the first are listed in "
    "data/tokens/rejects.jsonl",
    "truncated_rows": "{share} were truncated at {limit}; raise data.max_length",
    "no_answer_rows": "{share} were dropped because no answer was left within {limit}{first}; raise data.max_length",
    "dropped_long_rows": "{share} were dropped because they are longer than {limit}{first}; raise it or change "
    "data.over_length",
    "split_rows": "{share} were split because they are longer than {limit}",
    "empty_answer_rows": "{share} were dropped because an answer in them is empty{first}; fill or remove them",
    "reasoning_left_out_rows": "{share} have earlier answers whose reasoning the chat template omits{first}, so they "
    "are trained without it; data.train_on=last_assistant trains each row's last answer alone",
    "control_tokens_as_text": "control tokens in the rows' own text, encoded as plain characters: {count}{first}",
    "surrogates_replaced": "lone surrogates in the rows' text, replaced by U+FFFD: {count}{first}",
    "engine_fallback_rows": "rows encoded by tokenizers because tiktoken cannot: {count}",
    "sampled_rows_differing": "{count} of {sampled} sampled rows have other ids when encoded as one text: a token "
    "would cross from the prompt into the answer there, which never happens at inference",
}
"""By name of a count, the note for the user."""


def publish(job: TokenizeJob, root: Path, shards: Sequence[Shard], out: Path) -> list[str]:
    """Write the token directory `out` from the shards below `root` in one step; return notes for the user.

    Raises UserError if one side of the split is empty, or the disk cannot be written.
    """
    settings, sources, template = job.settings, job.data_lock["sources"], job.template
    with atomic_directory(out) as aside:
        totals = merge(
            *(root, shards, aside, len(sources), settings.max_length, settings.drop_duplicates, settings.kind),
            settings.attached,
        )
        _check_sides(totals, job)
        train, heldout = totals.side("train"), totals.side("heldout")
        longest = max(train.longest, heldout.longest)
        write_histogram(aside / "lengths.csv", train)
        _write_rejects(aside / "rejects.jsonl", totals, job.file_names)
        has_own_template = template is not None and settings.chat_template != "tokenizer"
        if template is not None and has_own_template:
            # For the tuned model, whose users must apply the same template.
            write_text(aside / CHAT_TEMPLATE, template.source)
        tokenizer = job.tokenizer.tokenizer
        meta = {
            "schema": SCHEMA,
            "vocab_size": tokenizer.vocab_size,
            "pad_id": tokenizer.pad.number,
            "pad_reason": tokenizer.pad.reason,
            "eos_id": tokenizer.eos_id,
            "chat_template_sha256": template and sha256_json(template.source),
            "own_chat_template": has_own_template,
            "chat_template_method": template and template.method,
            "chat_template_reason": template and template.reason,
            "max_length": settings.max_length,
            "train_rows": train.rows,
            "heldout_rows": heldout.rows,
            "longest": longest,
            "shards": len(shards),
            "files": list(job.file_names),
            "sources": [_source_meta(job, totals, index) for index in range(len(sources))],
            "tokenizer_sha256": job.inputs["tokenizer"],
            "data_sha256": sha256_json([source["files"] for source in sources]),
        }
        write_sealed(aside / "meta.json", meta)
        write_sealed(aside / FIGURES, _figures(totals, job, longest))
    return [*job.notes(), *_unread_notes(job, totals), *_notes(job, totals)]


def _unread_notes(job: TokenizeJob, totals: Totals) -> list[str]:
    """For each source, the columns that are not read, and the keys of turns that only the chat template may read."""
    found = []
    for what, by_source in (
        ("columns of {} that are not read", totals.tally.unread),
        ("keys of turns of {} that only the chat template may read", totals.tally.unknown),
    ):
        for index, names in sorted(by_source.items()):
            if names:
                more = " and more" if len(names) >= MAX_UNREAD_COLUMNS else ""
                source = job.data_lock["sources"][index]["source"]
                found.append(f"{what.format(source)}: {', '.join(names)}{more}")
    return found


def _source_meta(job: TokenizeJob, totals: Totals, index: int) -> dict[str, Any]:
    """The entry of a source in meta.json."""
    source = job.settings.sources[index]
    train, heldout = totals.sides["train"][index], totals.sides["heldout"][index]
    return {
        "source": job.data_lock["sources"][index]["source"],
        "format": source.format,
        "format_reason": job.format_reasons[index],
        "columns": dict(source.columns),
        "unread_columns": totals.tally.unread.get(index, []),
        "unknown_turn_keys": totals.tally.unknown.get(index, []),
        **_shared_figures(train, heldout, totals.tally.counts[index], job.settings.kind.unit),
        "lengths": {name: train.quantile(share) for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))},
        "longest": max(train.longest, heldout.longest),
    }


def _check_sides(totals: Totals, job: TokenizeJob) -> None:
    """Refuse a result without training rows, or without held-out rows where some were requested."""
    settings, counts = job.settings, totals.counts
    unit = settings.kind.unit
    rows = {"train on": totals.side("train").rows // unit, "evaluate on": totals.side("heldout").rows // unit}
    lost = {
        "no_answer_rows": f"without an answer within data.max_length={settings.max_length}",
        **{
            one.cut_count: one.cut_text.format(limit=f"data.max_length={settings.max_length}")
            for one in settings.attached
        },
        "dropped_long_rows": f"longer than data.max_length={settings.max_length}",
        "empty_answer_rows": "with an empty answer",
        "bad_rows": "that cannot be used",
    }
    why = "".join(f", {counts[name]} {text}" for name, text in lost.items() if counts[name])
    if not any(rows.values()):
        first = totals.tally.rejects[0]
        raise UserError(
            f"data.source: none of {counted(counts['rows'], 'row')} is usable ({why.removeprefix(', ')}); the first, "
            f"{job.file_names[first.file]}:{first.line}: {first.reason}"
        )
    for use, number in rows.items():
        if number:
            continue
        if any(source.is_heldout for source in settings.sources):
            side = "data.source" if use == "train on" else HELDOUT_SOURCE
            raise UserError(f"{side}: leaves no row to {use}{why}; add rows, or raise data.max_length")
        if settings.heldout_fraction:
            usable = counted(sum(rows.values()), "usable row")
            raise UserError(
                f"data.heldout_fraction: leaves no row to {use} ({usable}{why}; rows with the same prompt are held out "
                f"together); got {settings.heldout_fraction}; change it, add rows, name rows to evaluate on in "
                f"{HELDOUT_SOURCE}, or set it to 0 to train on all rows without evaluation"
            )
    for one, found in zip(settings.attached, totals.carried, strict=True):
        one.check(found, totals.rows, why)
    _check_unused(totals, job)


def _check_unused(totals: Totals, job: TokenizeJob) -> None:
    """Refuse parameters of what no row carries."""
    carried = {
        type(one) for one, found in zip(job.settings.attached, totals.carried, strict=True) if any(found.values())
    }
    for kind in COLUMNS:
        for name in kind.params if kind not in carried else ():
            if (value := getattr(job.data, name)) is not None:
                raise UserError(f"data.{name}: has an effect only on {kind.rows_text}; got {value}; leave it blank")


def _figures(totals: Totals, job: TokenizeJob, longest: int) -> dict[str, Any]:
    """The content of figures.json, over all sources."""
    train, heldout, counts, settings = totals.side("train"), totals.side("heldout"), totals.counts, job.settings
    shared = _shared_figures(train, heldout, counts, settings.kind.unit)
    carried: dict[str, int] = {}
    for one, found in zip(settings.attached, totals.carried, strict=True):
        carried |= one.figures(found)
    cut = {name: counts[name] for one in settings.attached if counts[name := one.cut_count]}
    return {
        **shared,
        **carried,
        **cut,
        "format": ", ".join(dict.fromkeys(source.format for source in settings.sources)),
        "mean_length": round(train.tokens / train.rows, 3),
        "longest": longest,
        "dropped_rows": sum(counts[name] for name in LEFT_OUT) + sum(cut.values()) + shared["duplicate_rows"],
    }


def _shared_figures(
    train: SourceTotals, heldout: SourceTotals, counts: Mapping[str, int], token_rows: int
) -> dict[str, Any]:
    """Figures of rows of the data, of which each is so many rows of tokens."""
    return {
        "train_rows": train.rows // token_rows,
        "heldout_rows": heldout.rows // token_rows,
        "train_tokens": train.tokens,
        "heldout_tokens": heldout.tokens,
        "supervised_tokens": train.supervised,
        "supervised_percent": round(100 * train.supervised / train.tokens, 3) if train.tokens else None,
        "duplicate_rows": (train.duplicates + heldout.duplicates) // token_rows,
        **{name: counts[name] for name in REPORTED},
    }


def write_histogram(path: Path, train: SourceTotals) -> None:
    """Write the histogram of training rows by length; `length` is a bin's upper edge in tokens."""
    width = -(-train.longest // HISTOGRAM_BINS)
    # Bin k counts lengths in (k * width, (k + 1) * width]. No row has length 0.
    lengths = np.arange(1, train.longest + 1)
    rows = np.bincount((lengths - 1) // width, weights=train.rows_by_length[1 : train.longest + 1])
    write_csv(path, ("length", "rows"), ({"length": (k + 1) * width, "rows": int(n)} for k, n in enumerate(rows)))


def _write_rejects(path: Path, totals: Totals, file_names: Sequence[str]) -> None:
    """Write the rejected rows as JSON Lines: file, line, row in the file (from 0) and reason."""
    lines = (
        {"file": file_names[one.file], "line": one.line, "row": one.row, "reason": one.reason}
        for one in totals.tally.rejects
    )
    write_text(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def _notes(job: TokenizeJob, totals: Totals) -> list[str]:
    """Notes for the user on rows that were left out or changed."""
    counts = totals.counts
    lines = []
    texts = NOTES.copy()
    for one in job.settings.attached:
        texts |= one.notes
    for name, text in texts.items():
        if not counts[name]:
            continue
        share = f"{counts[name]} of {counted(counts['rows'], 'row')} ({100 * counts[name] / counts['rows']:.1f} %)"
        first = ""
        if name in totals.tally.first:
            file, line = totals.tally.first[name]
            first = f" (first at {job.file_names[file]}:{line})"
        limit = f"data.max_length={job.settings.max_length}"
        lines.append(
            text.format(share=share, first=first, limit=limit, count=counts[name], sampled=counts["sampled_rows"])
        )
    train, heldout = totals.side("train"), totals.side("heldout")
    for one, found in zip(job.settings.attached, totals.carried, strict=True):
        lines += one.advice(found, totals.rows)
    if duplicates := (train.duplicates + heldout.duplicates) // job.settings.kind.unit:
        # Chunks of split rows are compared one by one, so there may be more duplicates than rows.
        compared = duplicates + (train.rows + heldout.rows) // job.settings.kind.unit
        kind = "rows and chunks of split rows" if counts["split_rows"] else "rows"
        lines.append(
            f"{duplicates} of {compared} {kind} were dropped because their tokens equal those of an earlier one"
        )
    return lines


# The run: the shards that are not finished are made by workers.

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
    make_tokenizer = partial(BlockTokenizer, job.settings, store=root, directories=job.directories)
    # The pool first: the thread of a progress bar would make forks unsafe.
    with (
        open_pool(job.tokenizer.in_store(root), make_tokenizer, workers, run.data_pool) as tokenize,
        progress_bar(total=data_bytes, desc="tokenize", unit="B", unit_scale=True, disable=not run.progress) as bar,
    ):

        def checked(blocks: Iterable[RowBlock]) -> Iterator[Result]:
            rows = tokens = 0
            for block, made in tokenize(blocks):
                if job.settings.on_bad_row == "fail" and (bad := made.tally.bad_row) is not None:
                    raise UserError(f"{job.file_names[bad.file]}:{bad.line}: {bad.reason}")
                rows += made.tally.counts[block.source]["rows"]
                tokens += sum(len(side.rows.column("input_ids").flatten()) for side in (made.train, made.heldout))
                if seconds := bar.format_dict["elapsed"]:
                    rates = f"{rows / seconds:,.0f} rows/s, {tokens / seconds:,.0f} tokens/s"
                    bar.set_postfix_str(rates, refresh=False)
                yield block, made

        blocks = read_blocks(job.data_lock, max_rows=job.data.max_rows, progress=bar.update)
        made = make_shards(root, job.key, blocks, checked)
    try:
        job.tokenizer_files.refuse_change()
        for one in job.settings.attached:
            one.refuse_change(job.data_lock, job.settings.sources, job.settings.ignore_columns)
    except UserError:
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
