"""Publishing of the token directory from finished shards, in one atomic step."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lean_finetune.config.data_schema import HELDOUT_SOURCE
from lean_finetune.core.atomic_files import FIGURES, atomic_directory, sha256_json, write_json, write_text
from lean_finetune.core.errors import UserError
from lean_finetune.data.shards.block_tokens import MAX_UNREAD_COLUMNS
from lean_finetune.data.shards.merge_shards import LocatedShard, Totals, merge
from lean_finetune.data.shards.statistics import figures, notes, source_figures, write_histogram, write_rejects
from lean_finetune.data.shards.tokenize_job import TokenizeJob
from lean_finetune.pinning.locate import CHAT_TEMPLATE

SCHEMA = 2


def publish(job: TokenizeJob, located: Sequence[LocatedShard], out: Path) -> list[str]:
    """Write the token directory `out` in one step; return notes for the user.

    Raises UserError if one side of the split is empty, or the disk cannot be written.
    """
    settings, sources, template = job.settings, job.data_lock["sources"], job.template
    with atomic_directory(out) as aside:
        totals = merge(located, aside, len(sources), settings.max_length, settings.drop_duplicates)
        _check_sides(totals, job)
        train, heldout = totals.side("train"), totals.side("heldout")
        longest = max(train.longest, heldout.longest)
        write_histogram(aside / "lengths.csv", train)
        write_rejects(aside / "rejects.jsonl", totals, job.file_names)
        if template is not None and settings.chat_template != "tokenizer":
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
            "chat_template_method": template and template.method,
            "chat_template_reason": template and template.reason,
            "max_length": settings.max_length,
            "train_rows": train.rows,
            "heldout_rows": heldout.rows,
            "longest": longest,
            "shards": len(located),
            "files": list(job.file_names),
            "sources": [_source_meta(job, totals, index) for index in range(len(sources))],
            "tokenizer_sha256": job.inputs["tokenizer"],
            "data_sha256": sha256_json([source["files"] for source in sources]),
        }
        write_json(aside / "meta.json", meta)
        write_json(aside / FIGURES, figures(totals, [source.format for source in settings.sources], longest))
    return [*job.notes(), *_unread_notes(job, totals), *notes(totals, settings, job.file_names)]


def _unread_notes(job: TokenizeJob, totals: Totals) -> list[str]:
    """For each source, the columns that are not read."""
    found = []
    for index, names in sorted(totals.tally.unread.items()):
        if names:
            more = " and more" if len(names) >= MAX_UNREAD_COLUMNS else ""
            source = job.data_lock["sources"][index]["source"]
            found.append(f"columns of {source} that are not read: {', '.join(names)}{more}")
    return found


def _source_meta(job: TokenizeJob, totals: Totals, index: int) -> dict[str, Any]:
    """The entry of a source in meta.json."""
    source = job.settings.sources[index]
    return {
        "source": job.data_lock["sources"][index]["source"],
        "format": source.format,
        "format_reason": job.format_reasons[index],
        "columns": dict(source.columns),
        "unread_columns": totals.tally.unread.get(index, []),
        **source_figures(totals, index),
    }


def _check_sides(totals: Totals, job: TokenizeJob) -> None:
    """Refuse a result without training rows, or without held-out rows where some were requested."""
    settings, counts = job.settings, totals.counts
    rows = {"train on": totals.side("train").rows, "evaluate on": totals.side("heldout").rows}
    lost = {
        "no_answer_rows": f"lost their answer to data.max_length={settings.max_length}",
        "dropped_long_rows": f"are longer than data.max_length={settings.max_length}",
        "empty_answer_rows": "have an empty answer",
        "bad_rows": "cannot be used",
    }
    why = "".join(f", {counts[name]} {text}" for name, text in lost.items() if counts[name])
    if not any(rows.values()):
        first = totals.tally.rejects[0]
        raise UserError(
            f"data.source: none of the {counts['rows']} rows is usable ({why.removeprefix(', ')}); the first, "
            f"{job.file_names[first.file]}:{first.line}: {first.reason}"
        )
    for use, number in rows.items():
        if number:
            continue
        if any(source.is_heldout for source in settings.sources):
            side = "data.source" if use == "train on" else HELDOUT_SOURCE
            raise UserError(f"{side}: leaves no row to {use}{why}; add rows, or raise data.max_length")
        if settings.heldout_fraction:
            raise UserError(
                f"data.heldout_fraction: leaves no row to {use} ({sum(rows.values())} usable rows{why}; rows with the "
                f"same prompt are held out together); got {settings.heldout_fraction}; change it, add rows, name rows "
                f"to evaluate on in {HELDOUT_SOURCE}, or set it to 0 to train on all rows without evaluation"
            )
