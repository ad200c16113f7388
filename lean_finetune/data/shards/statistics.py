"""Reports of tokenize: figures, notes for the user, the histogram of lengths, and the list of rejected rows."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lean_finetune.core.atomic_files import write_csv, write_text
from lean_finetune.data.shards.merge_shards import SourceTotals, Totals
from lean_finetune.data.shards.token_settings import TokenSettings

HISTOGRAM_BINS = 50
LEFT_OUT = ("bad_rows", "empty_answer_rows", "dropped_long_rows", "no_answer_rows")
"""Counts of rows that later stages do not get."""
# Equal for every engine, number of workers and machine.
REPORTED = (
    *("rows", "bad_rows", "empty_answer_rows", "truncated_rows", "dropped_long_rows", "split_rows", "no_answer_rows"),
    *("control_tokens_as_text", "surrogates_replaced", "sampled_rows", "sampled_rows_differing"),
)


def figures(totals: Totals, formats: Sequence[str], longest: int) -> dict[str, Any]:
    """The content of figures.json, over all sources."""
    train, heldout, counts = totals.side("train"), totals.side("heldout"), totals.counts
    shared = _shared_figures(train, heldout, counts)
    return {
        **shared,
        "format": ", ".join(dict.fromkeys(formats)),
        "mean_length": round(train.tokens / train.rows, 3),
        "longest": longest,
        "dropped_rows": sum(counts[name] for name in LEFT_OUT) + shared["duplicate_rows"],
    }


def source_figures(totals: Totals, source: int) -> dict[str, Any]:
    """The figures of one source for meta.json."""
    train, heldout = totals.sides["train"][source], totals.sides["heldout"][source]
    return {
        **_shared_figures(train, heldout, totals.tally.counts[source]),
        "lengths": {name: train.quantile(share) for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))},
        "longest": max(train.longest, heldout.longest),
    }


def _shared_figures(train: SourceTotals, heldout: SourceTotals, counts: Mapping[str, int]) -> dict[str, Any]:
    return {
        "train_rows": train.rows,
        "heldout_rows": heldout.rows,
        "train_tokens": train.tokens,
        "heldout_tokens": heldout.tokens,
        "supervised_tokens": train.supervised,
        "supervised_percent": round(100 * train.supervised / train.tokens, 3) if train.tokens else None,
        "duplicate_rows": train.duplicates + heldout.duplicates,
        **{name: counts[name] for name in REPORTED},
    }


def write_histogram(path: Path, train: SourceTotals) -> None:
    """Write the histogram of training rows by length; `length` is a bin's upper edge in tokens."""
    width = -(-train.longest // HISTOGRAM_BINS)
    # Bin k counts lengths in (k * width, (k + 1) * width]. No row has length 0.
    lengths = np.arange(1, train.longest + 1)
    rows = np.bincount((lengths - 1) // width, weights=train.rows_by_length[1 : train.longest + 1])
    write_csv(path, ("length", "rows"), ({"length": (k + 1) * width, "rows": int(n)} for k, n in enumerate(rows)))


def write_rejects(path: Path, totals: Totals, file_names: Sequence[str]) -> None:
    """Write the rejected rows as JSON Lines: file, line, row in the file (from 0) and reason."""
    lines = (
        {"file": file_names[one.file], "line": one.line, "row": one.row, "reason": one.reason}
        for one in totals.tally.rejects
    )
    write_text(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def notes(totals: Totals, settings: TokenSettings, file_names: Sequence[str]) -> list[str]:
    """Notes for the user on rows that were left out or changed."""
    counts, limit = totals.counts, f"data.max_length={settings.max_length}"

    def share(name: str) -> str:
        return f"{counts[name]} of {counts['rows']} rows ({100 * counts[name] / counts['rows']:.1f} %)"

    def first(name: str) -> str:
        if name not in totals.tally.first:
            return ""
        file, line = totals.tally.first[name]
        return f" (first at {file_names[file]}:{line})"

    texts = {
        "bad_rows": f"{share('bad_rows')} were left out because they cannot be used{first('bad_rows')}; the first are "
        "listed in data/tokens/rejects.jsonl",
        "truncated_rows": f"{share('truncated_rows')} were truncated at {limit}; raise data.max_length",
        "no_answer_rows": f"{share('no_answer_rows')} were dropped because no answer was left within {limit}"
        f"{first('no_answer_rows')}; raise data.max_length",
        "dropped_long_rows": f"{share('dropped_long_rows')} were dropped because they are longer than {limit}"
        f"{first('dropped_long_rows')}; raise it or change data.over_length",
        "split_rows": f"{share('split_rows')} were split because they are longer than {limit}",
        "empty_answer_rows": f"{share('empty_answer_rows')} were dropped because an answer in them is empty"
        f"{first('empty_answer_rows')}; fill or remove them",
        "reasoning_left_out_rows": f"{share('reasoning_left_out_rows')} have earlier answers whose reasoning "
        f"the chat template omits{first('reasoning_left_out_rows')}, so they are trained without it; "
        "data.train_on=last_assistant trains each row's last answer alone",
        "control_tokens_as_text": f"{counts['control_tokens_as_text']} control tokens in the rows' own text"
        f"{first('control_tokens_as_text')} were encoded as plain characters",
        "surrogates_replaced": f"{counts['surrogates_replaced']} lone surrogates in the rows' text"
        f"{first('surrogates_replaced')} were replaced by U+FFFD",
        "engine_fallback_rows": f"{counts['engine_fallback_rows']} rows were encoded by tokenizers because "
        "tiktoken cannot",
        "sampled_rows_differing": f"{counts['sampled_rows_differing']} of {counts['sampled_rows']} sampled rows "
        "have other ids when encoded as one text: a token would cross from the prompt into the answer there, "
        "which never happens at inference",
    }
    lines = [line for name, line in texts.items() if counts[name]]
    train, heldout = totals.side("train"), totals.side("heldout")
    if duplicates := train.duplicates + heldout.duplicates:
        # Chunks of split rows are compared one by one, so there may be more duplicates than rows.
        compared = duplicates + train.rows + heldout.rows
        kind = "rows and chunks of split rows" if counts["split_rows"] else "rows"
        lines.append(
            f"{duplicates} of {compared} {kind} were dropped because their tokens equal those of an earlier one"
        )
    return lines
