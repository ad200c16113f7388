"""What a worker does: a block of rows in, their tokens out."""

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import pyarrow as pa

from lean_finetune.core.errors import UserError
from lean_finetune.data.chat.chat_template import Template, open_template
from lean_finetune.data.chat.trained_segments import Segment
from lean_finetune.data.encode.encode_rows import RowTokenizer
from lean_finetune.data.encode.encoded_rows import EncodedRows
from lean_finetune.data.encode.engine_choice import Opened, open_engine
from lean_finetune.data.encode.max_length import CutRows, cut_rows
from lean_finetune.data.format.example import EmptyAnswer
from lean_finetune.data.format.row_formats import Conversation, Plain, RowFault, is_heldout, parse_row, row_family
from lean_finetune.data.format.token_settings import COUNTS, UNREAD_LISTED, BlockTokens, Settings, SourceShape
from lean_finetune.data.format.unread_columns import unread_columns, without
from lean_finetune.data.read.decode_rows import decode
from lean_finetune.data.read.row_block import Block, RawRow
from lean_finetune.data.read.worker_memory import bounded_growth
from lean_finetune.data.shards.token_columns import digests, record_batch, token_schema

RENDERING_BYTES, BYTES_PER_BYTE = 1 << 30, 32
"""Most memory that a block's rows can take as text: so much, and more where the block itself is large."""
ROWS_PER_SAMPLED_ROW = 128
"""Of a block's rows the first, the 129th, … are encoded a second time: it costs 1 % of the time."""


@dataclass(kw_only=True)
class _Rows:
    """A block's usable rows, a list for each thing that is known of them."""

    segments: list[list[Segment]] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)
    """(row number, line)."""
    families: list[str | None] = field(default_factory=list)
    heldout: list[bool] = field(default_factory=list)


@dataclass(kw_only=True)
class _Losses:
    """What was left out or changed, and where first."""

    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, tuple[int, int]] = field(default_factory=dict)
    rejects: list[tuple[int, int, str]] = field(default_factory=list)
    unread: set[str] = field(default_factory=set)

    def note(self, name: str, place: tuple[int, int], number: int = 1) -> None:
        """Count `number` of something at a row's place."""
        if number:
            self.counts[name] += number
            self.first.setdefault(name, place)

    def reject(self, name: str, place: tuple[int, int], reason: str) -> None:
        """Count a row that is not used, and list it."""
        self.note(name, place)
        self.rejects.append((*place, reason))


class BlockTokenizer:
    """Turns blocks into tokens; what it gives depends on the settings and the block alone."""

    def __init__(self, settings: Settings, opened: Opened | None = None):
        """Load the tokenizer, or take the one that is `opened` already; no thread is started.

        Raises:
            UserError: the tokenizer cannot be used.
        """
        self._settings = settings
        directory = settings.tokenizer_directory
        self.tokenizer = RowTokenizer(directory, opened or open_engine(settings.engine, directory))
        self._schema = token_schema(self.tokenizer.vocab_size, settings.max_length, settings.files)

    @cached_property
    def template(self) -> Template:
        """The chat template; rows of plain text need none."""
        settings = self._settings
        return open_template(
            settings.chat_template,
            settings.tokenizer_directory,
            self.tokenizer.special_tokens,
            settings.train_on,
            settings.template_date,
        )

    def __call__(self, block: Block) -> BlockTokens:
        """The tokens of a block.

        Raises:
            UserError: the block's file, the tokenizer or the template is at fault, not a row.
        """
        losses = _Losses()
        rows = self._read(block, losses)
        encoded = self.tokenizer.encode_rows(rows.segments)
        self._check_ids(encoded)
        self._sample(rows, encoded, losses)
        cut = cut_rows(encoded, self._settings.max_length, self._settings.over_length)
        self._tell_cut(cut, rows, encoded, losses)
        heldout = np.array(rows.heldout, bool)[cut.rows]
        train_batch, train_supervised, train_digests = self._side(block, cut.of(~heldout), encoded, rows)
        heldout_batch, heldout_supervised, heldout_digests = self._side(block, cut.of(heldout), encoded, rows)
        return BlockTokens(
            train=train_batch,
            heldout=heldout_batch,
            train_supervised=train_supervised,
            heldout_supervised=heldout_supervised,
            train_digests=train_digests,
            heldout_digests=heldout_digests,
            counts={name: losses.counts[name] for name in COUNTS},
            rejects=sorted(losses.rejects),
            first=losses.first,
            unread=sorted(losses.unread)[:UNREAD_LISTED],
        )

    def _read(self, block: Block, losses: _Losses) -> _Rows:
        """The block's usable rows; with on_bad_row: fail, those before the first that cannot be used."""
        rows = _Rows()
        shape = self._settings.sources[block.source]
        with bounded_growth(max(RENDERING_BYTES, BYTES_PER_BYTE * len(block.payload))):
            for raw in decode(block):
                losses.counts["rows"] += 1
                try:
                    self._prepare(raw, shape, rows, losses)
                    continue
                except RowFault as error:
                    fault = str(error)
                except RecursionError:
                    fault = "nested too deep; make the row flatter (or the chat template calls itself without end)"
                except MemoryError:
                    fault = "the chat template needs too much memory for it; mend the template, or remove the row"
                losses.reject("bad_rows", (raw.number, raw.line), fault)
                if self._settings.on_bad_row == "fail":
                    break
        return rows

    def _prepare(self, raw: RawRow, shape: SourceShape, rows: _Rows, losses: _Losses) -> None:
        """Add a row's segments, family and side, or count it where an answer in it is empty.

        Raises:
            RowFault: the row cannot be used.
        """
        if raw.value is None:
            raise RowFault(raw.fault)
        place = (raw.number, raw.line)
        row = without(raw.value, self._settings.ignore_columns)
        unread = unread_columns(row, shape)
        example = parse_row(row, shape)
        if example.has_empty_answer():
            losses.reject("empty_answer_rows", place, "an answer in it is empty")
            return
        family = row_family(row, shape)
        guard = self.tokenizer.guard
        found, replaced = guard.control_tokens, guard.surrogates
        template = self.template if isinstance(example, Conversation) else None
        left_out = template.reasoning_left_out if template else 0
        try:
            segments = self._segments(example)
        except EmptyAnswer as error:
            losses.reject("empty_answer_rows", place, str(error))
            return
        if family is not None:
            family = guard.clean(family)
        if template:
            losses.note("reasoning_left_out_rows", place, template.reasoning_left_out - left_out)
        fraction, seed = self._settings.heldout_fraction, self._settings.heldout_seed
        heldout = shape.is_heldout or is_heldout(example, fraction, seed)
        losses.unread.update(unread)
        losses.note("control_tokens_as_text", place, guard.control_tokens - found)
        losses.note("surrogates_replaced", place, guard.surrogates - replaced)
        rows.segments.append(segments)
        rows.places.append(place)
        rows.families.append(family)
        rows.heldout.append(heldout)

    def _segments(self, example: Conversation | Plain) -> list[Segment]:
        """The row as guarded text, trained and not."""
        guard = self.tokenizer.guard
        if isinstance(example, Conversation):
            if not guard.is_clean((example.messages, example.tools)):
                example = replace(example, messages=guard.protect(example.messages), tools=guard.protect(example.tools))
            return self.template.render(example)
        if not guard.is_clean((example.prompt, example.completion)):
            example = Plain(prompt=guard.protect(example.prompt), completion=guard.protect(example.completion))
        return self.tokenizer.plain_segments(example, self._settings.train_on)

    def _check_ids(self, encoded: EncodedRows) -> None:
        """Refuse what no row can be blamed for: a doubled BOS token, and padding that is trained.

        Raises:
            UserError: naming the token.
        """
        tokenizer, ids = self.tokenizer, encoded.ids
        starts = encoded.offsets[:-1][encoded.lengths > 1]
        if (
            tokenizer.bos_id is not None
            and ((ids[starts] == tokenizer.bos_id) & (ids[starts + 1] == tokenizer.bos_id)).any()
        ):
            raise UserError(
                f"data.chat_template: a row begins with two {tokenizer.special_tokens['bos_token']}, so the model "
                "would learn a text that it is never given; take one out of the template or of the rows"
            )
        if not tokenizer.pad_is_spare or not (found := np.flatnonzero(ids == tokenizer.pad_id)).size:
            return
        row = np.searchsorted(encoded.offsets, found, side="right") - 1
        # Spans as places in all ids; a place is inside one where more spans have begun than ended.
        spans = encoded.spans + encoded.offsets[encoded.span_rows][:, None]
        begun = np.searchsorted(spans[:, 0], found, side="right")
        ended = np.searchsorted(spans[:, 1], found, side="right")
        if (begun > ended).any():
            raise UserError(
                f"model.name: token {tokenizer.pad_id} pads rows ({tokenizer.pad_reason}), yet it is trained in row "
                f"{row[begun > ended][0]} of a block; name another pad_token in tokenizer_config.json"
            )

    def _sample(self, rows: _Rows, encoded: EncodedRows, losses: _Losses) -> None:
        """Encode some rows as one text too: segments apart give other ids where a token would cross."""
        for number in range(0, len(rows.segments), ROWS_PER_SAMPLED_ROW):
            ids = encoded.ids[encoded.offsets[number] : encoded.offsets[number + 1]]
            differs = self.tokenizer.encodes_otherwise(rows.segments[number], ids)
            if differs is not None:
                losses.counts["sampled_rows"] += 1
                losses.note("sampled_rows_differing", rows.places[number], int(differs))

    def _tell_cut(self, cut: CutRows, rows: _Rows, encoded: EncodedRows, losses: _Losses) -> None:
        """Count what data.max_length did, and the rows on which the engine gave up."""
        limit = self._settings.max_length
        for row in cut.truncated.tolist():
            losses.note("truncated_rows", rows.places[row])
        for row in cut.split.tolist():
            losses.note("split_rows", rows.places[row])
        for row in cut.dropped_long.tolist():
            losses.reject("dropped_long_rows", rows.places[row], f"longer than data.max_length={limit}")
        for row in cut.no_answer.tolist():
            losses.reject("no_answer_rows", rows.places[row], f"no answer is left within data.max_length={limit}")
        for row in sorted(encoded.failed):
            losses.note("engine_fallback_rows", rows.places[row])

    def _side(
        self, block: Block, cut: CutRows, encoded: EncodedRows, rows: _Rows
    ) -> tuple[pa.RecordBatch, np.ndarray, np.ndarray]:
        """(rows, supervised tokens of each, digest of each) of one side of the split."""
        numbers = np.array([number for number, _ in rows.places], np.uint32)
        batch = record_batch(self._schema, cut, encoded.ids, rows.families, block.file, numbers)
        digest = digests(batch) if self._settings.drop_duplicates else np.zeros(0, np.uint64)
        return batch, cut.supervised.astype(np.int32), digest
