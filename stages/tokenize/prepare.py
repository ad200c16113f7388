"""From pinned rows to token files: read, shape, render, encode, cut, split, write, in batches of bounded size."""

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from stages.errors import UserError
from stages.files import atomic_directory, sha256_json, write_csv, write_json
from stages.pin.locate import data_files
from stages.tokenize.chat import ChatTemplate, Segment
from stages.tokenize.encode import EncodedRow, RowTokenizer
from stages.tokenize.rows import Conversation, Plain, RowFault, detect_format, parse_row, row_family
from stages.tokenize.shards import TokenWriter, write_index
from stages.tokenize.sources import Row, read_rows

SCHEMA = 1
AUTO = "auto"
BATCH_ROWS = 512
# Rows of many megabytes are encoded in smaller batches.
BATCH_CHARACTERS = 4 << 20
HISTOGRAM_BINS = 50


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The part of params.yaml that decides the tokens."""

    format: str
    max_length: int
    heldout_fraction: float
    max_rows: int | None


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A row ready to be encoded."""

    row: Row
    segments: list[Segment]
    family: str | None
    heldout: bool


@dataclass(kw_only=True)
class Counts:
    """What happened to rows on the way."""

    encoded: int = 0
    truncated: int = 0
    """Encoded rows that lost trained tokens to data.max_length."""
    cut_off: int = 0
    """Truncated rows that lost all of them, and so are dropped."""
    empty: int = 0
    """Rows dropped before they were encoded, because an answer is empty."""
    first_empty: str = ""
    """Place of the first of them."""

    def notes(self, max_length: int) -> list[str]:
        """What the user should know about lost rows."""
        rows = self.encoded + self.empty
        notes = []
        if self.truncated:
            notes.append(
                f"{self.truncated} of {rows} rows ({100 * self.truncated / rows:.1f} %) were cut at data.max_length="
                f"{max_length}, and {self.cut_off} of them dropped since no answer was left; raise data.max_length"
            )
        if self.empty:
            notes.append(
                f"{self.empty} of {rows} rows ({100 * self.empty / rows:.1f} %) were dropped because an answer in them "
                f"is empty (first at {self.first_empty}); fill or remove them"
            )
        return notes


def prepare(
    data_lock: dict[str, Any],
    tokenizer_lock: dict[str, Any],
    tokenizer: RowTokenizer,
    settings: Settings,
    out: Path,
    progress: Callable[[int], Any],
) -> tuple[dict[str, Any], list[str]]:
    """Write the token directory `out` in one step; return the metrics and notes for the user.

    `progress` is told source bytes as they are read.

    Raises:
        UserError: a row cannot be used, the data changed since it was pinned, or one side of the split is empty.
    """
    rows, shape, reason = _resolve_format(read_rows(data_files(data_lock), settings.max_rows, progress), settings)
    counts = Counts()
    shaper = _Shaper(tokenizer, shape, settings.heldout_fraction, counts)
    with atomic_directory(out) as aside:
        with (
            TokenWriter(aside / "train.arrow", tokenizer.vocab_size) as train,
            TokenWriter(aside / "heldout.arrow", tokenizer.vocab_size) as heldout,
        ):
            for batch in _batches(shaper.prepare_all(rows)):
                for prepared, encoded in _encode(
                    tokenizer, batch, shaper.template is not None, settings.max_length, counts
                ):
                    side = heldout if prepared.heldout else train
                    side.add(encoded, prepared.family, prepared.row.number)
        _check_sides(train, heldout, counts, settings)
        write_index(aside / "index.arrow", train.lengths, train.supervised)
        _write_histogram(aside / "lengths.csv", train.lengths)
        template_source = shaper.template.source if shaper.template else None
        meta = {
            "schema": SCHEMA,
            "vocab_size": tokenizer.vocab_size,
            "pad_id": 0 if tokenizer.pad_id is None else tokenizer.pad_id,
            "eos_id": tokenizer.eos_id,
            "max_length": settings.max_length,
            "format": shape,
            "format_reason": reason,
            "train_rows": len(train.lengths),
            "heldout_rows": len(heldout.lengths),
            "longest": max(max(train.lengths), max(heldout.lengths)),
            "tokenizer_sha256": sha256_json(tokenizer_lock["files"]),
            "chat_template_sha256": None if template_source is None else sha256_json(template_source),
            "data_sha256": sha256_json(data_lock["files"]),
        }
        write_json(aside / "meta.json", meta)
    notes = [f"data.format is {shape}: {reason}", *shaper.notes(), *counts.notes(settings.max_length)]
    return _metrics(meta, train, counts, tokenizer), notes


def _resolve_format(rows: Iterator[Row], settings: Settings) -> tuple[Iterator[Row], str, str]:
    """(all rows, their shape, why that shape)."""
    first = next(rows, None)
    if first is None:
        raise UserError("data.source: holds no rows; put rows into it or name another file")
    rows = chain([first], rows)
    if settings.format != AUTO:
        return rows, settings.format, "params.yaml says so"
    try:
        shape, reason = detect_format(first.value)
    except RowFault as fault:
        raise UserError(f"{first.place}: {fault}") from None
    return rows, shape, reason


class _Shaper:
    """Turns rows of one shape into guarded text segments."""

    def __init__(self, tokenizer: RowTokenizer, shape: str, heldout_fraction: float, counts: Counts):
        self._tokenizer, self._shape, self._heldout_fraction = tokenizer, shape, heldout_fraction
        self._counts = counts
        is_plain = shape in ("prompt_completion", "text")
        self.template: ChatTemplate | None = None if is_plain else tokenizer.template()
        self._first_guarded: str | None = None

    def prepare_all(self, rows: Iterable[Row]) -> Iterator[Prepared]:
        """Each row's segments, family and side, but for rows with an empty answer, which are counted.

        Raises:
            UserError: naming file:line and what is wrong with the row.
        """
        for row in rows:
            try:
                example = parse_row(row.value, self._shape)
                if not example.has_empty_answer():
                    yield self._prepare(row, example)
                    continue
            except RowFault as fault:
                raise UserError(f"{row.place}: {fault}") from None
            except RecursionError:
                raise UserError(f"{row.place}: nested too deep; make the row flatter") from None
            self._counts.first_empty = self._counts.first_empty or row.place
            self._counts.empty += 1

    def _prepare(self, row: Row, example: Conversation | Plain) -> Prepared:
        guard = self._tokenizer.guard
        found = guard.control_tokens
        family = row_family(row.value)
        prepared = Prepared(
            row=row,
            segments=self._segments(example),
            family=None if family is None else guard.clean(family),
            heldout=is_heldout(example, self._heldout_fraction),
        )
        if guard.control_tokens > found and self._first_guarded is None:
            self._first_guarded = row.place
        return prepared

    def _segments(self, example: Conversation | Plain) -> list[Segment]:
        protect = self._tokenizer.guard.protect
        if isinstance(example, Plain):
            plain = Plain(prompt=protect(example.prompt), completion=protect(example.completion))
            return self._tokenizer.plain_segments(plain)
        assert self.template is not None
        guarded = replace(example, messages=protect(example.messages), tools=protect(example.tools))
        return self.template.render(guarded)

    def notes(self) -> list[str]:
        """What was changed in the rows' text, for the user."""
        guard = self._tokenizer.guard
        notes = []
        if guard.control_tokens:
            notes.append(
                f"{guard.control_tokens} control tokens in the rows' own text (first at {self._first_guarded}) were "
                "encoded as plain characters"
            )
        if guard.surrogates:
            notes.append(f"{guard.surrogates} lone surrogates in the rows' text were replaced by U+FFFD")
        return notes


def is_heldout(example: Conversation | Plain, fraction: float) -> bool:
    """Whether a hash of what precedes the first answer holds the row out: equal beginnings share a side."""
    return int(example.prompt_key()[:16], 16) / 2**64 < fraction


def _batches(prepared: Iterable[Prepared]) -> Iterator[list[Prepared]]:
    """Rows in batches bounded by number and by characters."""
    batch: list[Prepared] = []
    characters = 0
    for item in prepared:
        batch.append(item)
        characters += sum(len(segment.text) for segment in item.segments)
        if len(batch) == BATCH_ROWS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _encode(
    tokenizer: RowTokenizer, batch: list[Prepared], is_chat: bool, max_length: int, counts: Counts
) -> Iterator[tuple[Prepared, EncodedRow]]:
    """The rows of a batch as tokens, without those that are left with nothing to learn."""
    encoded = tokenizer.encode_rows([prepared.segments for prepared in batch])
    for prepared, row in zip(batch, encoded, strict=True):
        if is_chat and counts.encoded == 0 and not tokenizer.ends_turn(row):
            raise UserError(
                f"{prepared.row.place}: the chat template trains no end-of-turn token after the answer, so the model "
                "would not learn to stop; move {% endgeneration %} behind it"
            )
        counts.encoded += 1
        kept = row.cut(max_length)
        counts.truncated += int(kept.trained < row.trained)
        if kept.supervised == 0:
            counts.cut_off += 1
            continue
        yield prepared, kept


def _check_sides(train: TokenWriter, heldout: TokenWriter, counts: Counts, settings: Settings) -> None:
    """Both sides of the split need a row."""
    sides = {"train on": train.lengths, "evaluate on": heldout.lengths}
    for use, lengths in sides.items():
        if len(lengths) == 0:
            usable = len(train.lengths) + len(heldout.lengths)
            lost = f", {counts.cut_off} lost their answer to data.max_length={settings.max_length}" * (
                counts.cut_off > 0
            )
            lost += f", {counts.empty} have an empty answer" * (counts.empty > 0)
            raise UserError(
                f"data.heldout_fraction: leaves no row to {use} ({usable} usable rows{lost}); "
                f"got {settings.heldout_fraction}; change it, add rows, or raise data.max_length"
            )


def _write_histogram(path: Path, lengths: array) -> None:
    """Rows by length in equal bins: `length` is a bin's upper edge in tokens."""
    width = -(-max(lengths) // HISTOGRAM_BINS)
    # Bin k holds lengths in (k * width, (k + 1) * width].
    rows = np.bincount((np.frombuffer(lengths, np.int32) - 1) // width)
    write_csv(path, ("length", "rows"), ({"length": (k + 1) * width, "rows": int(n)} for k, n in enumerate(rows)))


def _metrics(meta: dict[str, Any], train: TokenWriter, counts: Counts, tokenizer: RowTokenizer) -> dict[str, Any]:
    """metrics/tokenize.json."""
    tokens, supervised = sum(train.lengths), sum(train.supervised)
    return {
        "format": meta["format"],
        "train_rows": meta["train_rows"],
        "heldout_rows": meta["heldout_rows"],
        "train_tokens": tokens,
        "supervised_tokens": supervised,
        "supervised_percent": round(100 * supervised / tokens, 3),
        "mean_length": round(tokens / meta["train_rows"], 3),
        "longest": meta["longest"],
        "truncated_rows": counts.truncated,
        "dropped_rows": counts.cut_off + counts.empty,
        "empty_answer_rows": counts.empty,
        "control_tokens_as_text": tokenizer.guard.control_tokens,
        "surrogates_replaced": tokenizer.guard.surrogates,
    }
