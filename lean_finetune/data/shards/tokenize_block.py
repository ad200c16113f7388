"""Tokenizing of one block of rows, the work of a worker."""

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import pyarrow as pa

from lean_finetune.core.errors import UserError
from lean_finetune.data.chat.chat_template import ChatTemplate, load_template
from lean_finetune.data.chat.trained_segments import Segment
from lean_finetune.data.encode.encoded_rows import EncodedRows
from lean_finetune.data.encode.engine_choice import LoadedTokenizer, load_tokenizer
from lean_finetune.data.encode.max_length import Chunks, limit_lengths
from lean_finetune.data.encode.row_tokenizer import RowTokenizer
from lean_finetune.data.format.example import Conversation, EmptyAnswer, PlainText, RowFault, is_heldout
from lean_finetune.data.format.format_base import SourceFormat
from lean_finetune.data.format.row_formats import parse_row, row_family
from lean_finetune.data.format.unread_columns import unread_columns, without
from lean_finetune.data.read.decode_rows import decode
from lean_finetune.data.read.row_block import RawRow, RowBlock
from lean_finetune.data.read.worker_memory import limited_memory_growth
from lean_finetune.data.shards.block_tokens import (
    COUNTS,
    MAX_UNREAD_COLUMNS,
    BlockTokens,
    digests,
    record_batch,
    token_schema,
)
from lean_finetune.data.shards.token_settings import TokenSettings

RENDERING_BYTES, RENDERING_BYTES_PER_BYTE = 1 << 30, 32
"""Most memory for rendering a block's rows: the larger of the first, and the second for each byte of the block."""
ROWS_PER_SAMPLED_ROW = 128
"""Every 128th row of a block is encoded a second time, as one text. This takes 1 % of the time."""


@dataclass(kw_only=True)
class _Rows:
    """The usable rows of a block, as one list for each property."""

    segments: list[list[Segment]] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)
    """(row number, line)."""
    families: list[str | None] = field(default_factory=list)
    heldout: list[bool] = field(default_factory=list)


@dataclass(kw_only=True)
class _Counter:
    """Counts of rows that were left out or changed, with the first row of each count."""

    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, tuple[int, int]] = field(default_factory=dict)
    rejects: list[tuple[int, int, str]] = field(default_factory=list)
    unread: set[str] = field(default_factory=set)

    def add(self, name: str, place: tuple[int, int], number: int = 1) -> None:
        """Add `number` to a count, for the row at a place."""
        if number:
            self.counts[name] += number
            self.first.setdefault(name, place)

    def reject(self, name: str, place: tuple[int, int], reason: str) -> None:
        """Count and list a row that is not used."""
        self.add(name, place)
        self.rejects.append((*place, reason))


class BlockTokenizer:
    """Turns blocks into tokens. The result depends on the settings and the block alone."""

    def __init__(self, settings: TokenSettings, loaded: LoadedTokenizer | None = None):
        """Use the tokenizer that is `loaded` already, or load it; no thread is started.

        Raises:
            UserError: the tokenizer cannot be used.
        """
        self._settings = settings
        directory = settings.tokenizer_directory
        self.tokenizer = RowTokenizer(directory, loaded or load_tokenizer(settings.engine, directory))
        self._schema = token_schema(self.tokenizer.vocab_size, settings.max_length, settings.files)

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template. Rows of plain text need none, so it is loaded on first use."""
        settings = self._settings
        return load_template(
            settings.chat_template,
            settings.tokenizer_directory,
            self.tokenizer.special_tokens,
            settings.train_on,
            settings.template_date,
        )

    def __call__(self, block: RowBlock) -> BlockTokens:
        """The tokens of a block.

        Raises:
            UserError: the block's file, the tokenizer or the template is at fault, not a row.
        """
        counter = _Counter()
        rows = self._read(block, counter)
        encoded = self.tokenizer.encode_rows(rows.segments)
        self._check_ids(encoded)
        self._sample(rows, encoded, counter)
        chunks = limit_lengths(encoded, self._settings.max_length, self._settings.over_length)
        self._count_limited(chunks, rows, encoded, counter)
        heldout = np.array(rows.heldout, bool)[chunks.rows]
        train_batch, train_supervised, train_digests = self._side(block, chunks.select(~heldout), encoded, rows)
        heldout_batch, heldout_supervised, heldout_digests = self._side(block, chunks.select(heldout), encoded, rows)
        return BlockTokens(
            train=train_batch,
            heldout=heldout_batch,
            train_supervised=train_supervised,
            heldout_supervised=heldout_supervised,
            train_digests=train_digests,
            heldout_digests=heldout_digests,
            counts={name: counter.counts[name] for name in COUNTS},
            rejects=sorted(counter.rejects),
            first=counter.first,
            unread=sorted(counter.unread)[:MAX_UNREAD_COLUMNS],
        )

    def _read(self, block: RowBlock, counter: _Counter) -> _Rows:
        """The block's usable rows; with on_bad_row: fail, those before the first bad one."""
        rows = _Rows()
        source = self._settings.sources[block.source]
        with limited_memory_growth(max(RENDERING_BYTES, RENDERING_BYTES_PER_BYTE * len(block.payload))):
            for raw in decode(block):
                counter.counts["rows"] += 1
                try:
                    self._add_row(raw, source, rows, counter)
                    continue
                except RowFault as error:
                    fault = str(error)
                except RecursionError:
                    fault = "nested too deep; make the row flatter (or the chat template calls itself without end)"
                except MemoryError:
                    fault = "the chat template needs too much memory for it; correct the template, or remove the row"
                counter.reject("bad_rows", (raw.number, raw.line), fault)
                if self._settings.on_bad_row == "fail":
                    break
        return rows

    def _add_row(self, raw: RawRow, source: SourceFormat, rows: _Rows, counter: _Counter) -> None:
        """Add a row to `rows`, or count it if a trained answer is empty."""
        if raw.value is None:
            raise RowFault(raw.fault)
        place = (raw.number, raw.line)
        row = without(raw.value, self._settings.ignore_columns)
        unread = unread_columns(row, source)
        example = parse_row(row, source)
        if example.has_empty_answer():
            counter.reject("empty_answer_rows", place, "an answer in it is empty")
            return
        family = row_family(row, source)
        guard = self.tokenizer.guard
        control_tokens, surrogates = guard.control_tokens, guard.surrogates
        template = self.template if isinstance(example, Conversation) else None
        left_out = template.reasoning_left_out if template else 0
        try:
            segments = self._segments(example)
        except EmptyAnswer as error:
            counter.reject("empty_answer_rows", place, str(error))
            return
        if family is not None:
            family = guard.clean(family)
        if template:
            counter.add("reasoning_left_out_rows", place, template.reasoning_left_out - left_out)
        fraction, seed = self._settings.heldout_fraction, self._settings.heldout_seed
        heldout = source.is_heldout or is_heldout(example, fraction, seed)
        counter.unread.update(unread)
        counter.add("control_tokens_as_text", place, guard.control_tokens - control_tokens)
        counter.add("surrogates_replaced", place, guard.surrogates - surrogates)
        rows.segments.append(segments)
        rows.places.append(place)
        rows.families.append(family)
        rows.heldout.append(heldout)

    def _segments(self, example: Conversation | PlainText) -> list[Segment]:
        """The row's text, guarded, in trained and other segments."""
        guard = self.tokenizer.guard
        if isinstance(example, Conversation):
            if not guard.is_clean((example.messages, example.tools)):
                example = replace(example, messages=guard.protect(example.messages), tools=guard.protect(example.tools))
            return self.template.render(example)
        if not guard.is_clean((example.prompt, example.completion)):
            example = PlainText(prompt=guard.protect(example.prompt), completion=guard.protect(example.completion))
        return self.tokenizer.plain_segments(example, self._settings.train_on)

    def _check_ids(self, encoded: EncodedRows) -> None:
        """Refuse faults of the tokenizer or template: a doubled BOS token, or a padding token that is trained."""
        tokenizer, ids = self.tokenizer, encoded.ids
        starts = encoded.offsets[:-1][encoded.lengths > 1]
        if (
            tokenizer.bos_id is not None
            and ((ids[starts] == tokenizer.bos_id) & (ids[starts + 1] == tokenizer.bos_id)).any()
        ):
            raise UserError(
                f"data.chat_template: a row begins with two {tokenizer.special_tokens['bos_token']}, so the model "
                "would learn a start that it never gets at inference; remove one from the template or the rows"
            )
        if not tokenizer.pad_is_spare or not (found := np.flatnonzero(ids == tokenizer.pad_id)).size:
            return
        row = np.searchsorted(encoded.offsets, found, side="right") - 1
        # With spans as indices into all ids, an index is inside one if more spans began than ended before it.
        spans = encoded.spans + encoded.offsets[encoded.span_rows][:, None]
        begun = np.searchsorted(spans[:, 0], found, side="right")
        ended = np.searchsorted(spans[:, 1], found, side="right")
        if (begun > ended).any():
            raise UserError(
                f"model.name: token {tokenizer.pad_id} pads rows ({tokenizer.pad_reason}), yet it is trained in row "
                f"{row[begun > ended][0]} of a block; name another pad_token in tokenizer_config.json"
            )

    def _sample(self, rows: _Rows, encoded: EncodedRows, counter: _Counter) -> None:
        """Encode some rows as one text too, to count those whose ids differ because a token would cross segments."""
        for number in range(0, len(rows.segments), ROWS_PER_SAMPLED_ROW):
            ids = encoded.ids[encoded.offsets[number] : encoded.offsets[number + 1]]
            differs = self.tokenizer.differs_when_joined(rows.segments[number], ids)
            if differs is not None:
                counter.counts["sampled_rows"] += 1
                counter.add("sampled_rows_differing", rows.places[number], int(differs))

    def _count_limited(self, chunks: Chunks, rows: _Rows, encoded: EncodedRows, counter: _Counter) -> None:
        """Count the effects of data.max_length, and the rows that the engine could not encode."""
        limit = self._settings.max_length
        for row in chunks.truncated.tolist():
            counter.add("truncated_rows", rows.places[row])
        for row in chunks.split.tolist():
            counter.add("split_rows", rows.places[row])
        for row in chunks.dropped_long.tolist():
            counter.reject("dropped_long_rows", rows.places[row], f"longer than data.max_length={limit}")
        for row in chunks.no_answer.tolist():
            counter.reject("no_answer_rows", rows.places[row], f"no answer is left within data.max_length={limit}")
        for row in sorted(encoded.failed):
            counter.add("engine_fallback_rows", rows.places[row])

    def _side(
        self, block: RowBlock, chunks: Chunks, encoded: EncodedRows, rows: _Rows
    ) -> tuple[pa.RecordBatch, np.ndarray, np.ndarray]:
        """(rows, trained tokens of each, digest of each) of one side of the split."""
        numbers = np.array([number for number, _ in rows.places], np.uint32)
        batch = record_batch(self._schema, chunks, encoded.ids, rows.families, block.file, numbers)
        digest = digests(batch) if self._settings.drop_duplicates else np.zeros(0, np.uint64)
        return batch, chunks.supervised.astype(np.int32), digest
