"""Tokenizing of one block of rows, the work of a worker."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

import lean_finetune.islands.columns  # noqa: F401 - registers the formats of rows
from lean_finetune.core.errors import RowFault, UserError, one_line
from lean_finetune.data.chat.chat_template import ChatTemplate, load_template
from lean_finetune.data.chat.compiled_template import LIMITS_MET, limit_met, work_limits
from lean_finetune.data.chat.control_tokens import TextSegment
from lean_finetune.data.encode.row_tokenizer import Chunks, RowTokenizer, limit_lengths
from lean_finetune.data.encode.tokenizer_engine import Engine, load_engine
from lean_finetune.data.encode.whole_row_encoder import EncodedRows
from lean_finetune.data.format.format_base import (
    Compared,
    Conversation,
    EmptyAnswer,
    PlainText,
    SourceFormat,
    is_heldout,
    parts_of,
)
from lean_finetune.data.format.messages import unknown_keys
from lean_finetune.data.format.row_formats import parse_row, row_family
from lean_finetune.data.format.unread_columns import unread_columns, without
from lean_finetune.data.read.decode_rows import decode
from lean_finetune.data.read.row_block import BLOCK_BYTES, RawRow, RowBlock
from lean_finetune.data.shards.shard_files import (
    BlockTokens,
    SideTokens,
    digests,
    record_batch,
    token_schema,
)
from lean_finetune.data.shards.tally import Reject, Tally
from lean_finetune.objectives.row_kind import RowKind
from lean_finetune.rows.columns import RowColumns

RENDERING_BYTES, RENDERING_BYTES_PER_BYTE = 1 << 30, 32
"""Most memory for rendering a block's rows: the larger of the first, and the second for each byte of the block."""
ROW_SECONDS = 60.0
"""Most time of a processor for rendering a row; more in blocks with a long row."""
ROWS_PER_SAMPLED_ROW = 128
"""Every 128th row of a block is encoded a second time, as one text. This takes 1 % of the time."""


@dataclass(frozen=True, kw_only=True)
class TokenSettings:
    """Everything besides its bytes that decides the tokens of a block. Each worker gets it once."""

    tokenizer_directory: Path
    sources: tuple[SourceFormat, ...]
    """In the order of the data lock."""
    ignore_columns: tuple[str, ...]
    """Columns that are dropped before a row is read."""
    files: int
    """Number of files of all sources."""
    chat_template: str
    """`tokenizer`, `chatml`, or the text of the user's template."""
    template_date: str
    """Date that templates get as today, YYYY-MM-DD."""
    train_on: str
    end_of_turn: str
    stop_ids: tuple[int, ...]
    """Tokens at which the model's generation stops; empty: the tokenizer's end-of-sequence token."""
    max_length: int
    over_length: str
    on_bad_row: str
    drop_duplicates: bool
    heldout_fraction: float
    heldout_seed: int
    engine: str
    """`tokenizers` or `tiktoken`."""
    kind: RowKind = RowKind.ANSWER
    """What each row is for the objective."""
    attached: tuple[RowColumns, ...] = ()
    """What rows carry besides tokens."""


RowPlace = tuple[int, int]
"""(row number, line)."""


@dataclass(kw_only=True)
class _Rows:
    """The usable rows of a block, as one list for each property, and the tally of all its rows."""

    block: RowBlock
    kind: RowKind = RowKind.ANSWER
    """What each row of the block is. Of pairs, rows 0 and 1, 2 and 3, … are from one row of it."""
    segments: list[list[TextSegment]] = field(default_factory=list)
    places: list[RowPlace] = field(default_factory=list)
    families: list[str | None] = field(default_factory=list)
    heldout: list[bool] = field(default_factory=list)
    carried: list[tuple[Any, ...]] = field(default_factory=list)
    """Its value of each attachment of the run."""
    unread: set[str] = field(default_factory=set)
    unknown: set[str] = field(default_factory=set)
    tally: Tally = field(default_factory=Tally)

    def count(self, name: str, place: RowPlace, number: int = 1) -> None:
        """Add `number` to a count, for the row at a place."""
        if number:
            self.tally.counts[self.block.source][name] += number
            here = self.block.file, place[1]
            self.tally.first[name] = min(here, self.tally.first.get(name, here))

    def reject(self, name: str, place: RowPlace, reason: str) -> None:
        """Count and list a row that is not used."""
        self.count(name, place)
        self.tally.rejects.append(Reject(self.block.file, *place, reason))

    def places_of(self, numbers: Iterable[int]) -> list[RowPlace]:
        """The places of rows, each once: both rows of a pair have one."""
        return list(dict.fromkeys(self.places[number] for number in numbers))

    def remove(self, cut: dict[int, str]) -> None:
        """Remove rows whose ids lack a control token of their text; `cut` has that token by index."""
        for number, token in cut.items():
            self.reject(
                "bad_rows",
                self.places[number],
                f"the control token {token!r} of its text is not one token of its ids: a generation mark of the chat "
                "template lies inside it, or the text around it continues it; correct the template, or change the row",
            )
        firsts = {number - number % self.kind.unit for number in cut}
        gone = {first + number for first in firsts for number in range(self.kind.unit)}
        kept = [number for number in range(len(self.segments)) if number not in gone]
        self.segments = [self.segments[number] for number in kept]
        self.places = [self.places[number] for number in kept]
        self.families = [self.families[number] for number in kept]
        self.heldout = [self.heldout[number] for number in kept]
        self.carried = [self.carried[number] for number in kept]

    def values(self, place: int, numbers: Iterable[int]) -> list[Any]:
        """What these rows have of the attachment at a place in `TokenSettings.attached`."""
        return [self.carried[number][place] for number in numbers]


class BlockTokenizer:
    """Turns blocks into tokens. The result depends on the settings and the block alone."""

    def __init__(
        self,
        settings: TokenSettings,
        engine: Engine | None = None,
        store: Path | None = None,
        directories: Sequence[Path | None] = (),
    ):
        """Use this engine, or load that of the settings; no thread is started.

        `store` is the directory for files that rows carry; None: they are not kept. `directories` has that of each file
        of rows, None for a file on the hub.

        Raises UserError if the tokenizer cannot be used.
        """
        self._settings, self._directories = settings, directories
        directory = settings.tokenizer_directory
        self.tokenizer = RowTokenizer(directory, engine or load_engine(settings.engine, directory))
        self._schema = token_schema(self.tokenizer.vocab_size, settings.max_length, settings.files, settings.attached)
        self.in_store(store)

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
            settings.end_of_turn,
            self.tokenizer.texts_of(settings.stop_ids),
        )

    def in_store(self, store: Path | None) -> "BlockTokenizer":
        """The same, with files that rows carry below `store`."""
        opened = (one.opened(self.tokenizer, store, self._directories) for one in self._settings.attached)
        self._attached = tuple(opened)
        return self

    def __call__(self, block: RowBlock) -> BlockTokens:
        """The tokens of a block.

        Raises UserError if the block's file, the tokenizer or the template is at fault, not a row.
        """
        rows = self._read(block)
        encoded = self.tokenizer.encode_rows(rows.segments)
        if cut := self.tokenizer.cut_tokens(rows.segments, encoded):
            rows.remove(cut)
            encoded = self.tokenizer.encode_rows(rows.segments)
        self._check_ids(encoded)
        self._sample(rows, encoded)
        chunks = limit_lengths(encoded, self._settings.max_length, self._settings.over_length)
        self._count_limited(chunks, rows, encoded)
        if rows.kind.unit > 1:
            chunks = self._complete_pairs(chunks, rows, encoded)
        chunks = self._complete_values(chunks, rows, encoded)
        is_heldout = np.array(rows.heldout, bool)[chunks.rows]
        rows.tally.rejects.sort()
        rows.tally.unread[block.source] = sorted(map(one_line, rows.unread))
        rows.tally.unknown[block.source] = sorted(map(one_line, rows.unknown))
        return BlockTokens(
            self._side(chunks.select(~is_heldout), encoded, rows),
            self._side(chunks.select(is_heldout), encoded, rows),
            rows.tally,
        )

    def _read(self, block: RowBlock) -> _Rows:
        """The block's usable rows; with on_bad_row: fail, those before the first bad one."""
        rows = _Rows(block=block, kind=self._settings.kind)
        source = self._settings.sources[block.source]
        for one in self._attached:
            one.prepare(block, source)
        size_bytes = max(RENDERING_BYTES, RENDERING_BYTES_PER_BYTE * len(block.payload))
        seconds = max(ROW_SECONDS, ROW_SECONDS * len(block.payload) / BLOCK_BYTES)
        with work_limits(size_bytes, seconds) as restart:
            for raw in decode(block):
                restart()
                place = (raw.number, raw.line)
                rows.count("rows", place)
                try:
                    self._add_row(raw, place, source, rows)
                    continue
                except EmptyAnswer as error:
                    rows.reject("empty_answer_rows", place, str(error))
                    continue
                except RowFault as error:
                    fault = str(error)
                except LIMITS_MET as error:
                    fault = f"the chat template {limit_met(error)} it; correct the template, or remove the row"
                rows.reject("bad_rows", place, fault)
                if self._settings.on_bad_row == "fail":
                    break
        return rows

    def _add_row(self, raw: RawRow, place: RowPlace, source: SourceFormat, rows: _Rows) -> None:
        """Add a row to `rows`.

        Raises RowFault if it cannot be used. Raises EmptyAnswer if a trained answer is empty.
        """
        if raw.value is None:
            raise RowFault(str(raw.fault))
        row = without(raw.value, self._settings.ignore_columns)
        unread = unread_columns(row, source)
        example = parse_row(row, source)
        if isinstance(example, Compared) and self._settings.train_on == "last_assistant":
            example.check_last_turns()
        if example.has_empty_answer():
            raise EmptyAnswer("an answer in it is empty")
        family = row_family(row, source)
        guard = self.tokenizer.guard
        parts = parts_of(example)
        template = self.template if isinstance(parts[0], Conversation) else None

        def changes() -> list[int]:
            left_out = template.reasoning_left_out if template else 0
            return [left_out, guard.control_tokens, guard.surrogates]

        before = changes()
        segments = [self._segments(part) for part in parts]
        values = []
        for one in self._attached:
            values.append(one.value(row, example, source, rows.block.file))
            segments = one.filled(segments, values[-1])
        family = None if family is None else guard.clean(family)
        rows.unread.update(unread)
        for part in parts:
            if isinstance(part, Conversation):
                rows.unknown |= unknown_keys(part.messages)
        names = ("reasoning_left_out_rows", "control_tokens_as_text", "surrogates_replaced")
        for name, old, new in zip(names, before, changes(), strict=True):
            rows.count(name, place, new - old)
        for one, value in zip(self._attached, values, strict=True):
            for name, number in one.counts(value).items():
                rows.count(name, place, number)
        settings = self._settings
        heldout = source.is_heldout or is_heldout(example, settings.heldout_fraction, settings.heldout_seed)
        rows.segments += segments
        rows.places += [place] * len(parts)
        rows.families += [family] * len(parts)
        rows.heldout += [heldout] * len(parts)
        rows.carried += [tuple(values)] * len(parts)

    def _segments(self, example: Conversation | PlainText) -> list[TextSegment]:
        """The row's text, guarded, in trained and other segments."""
        guard = self.tokenizer.guard
        if isinstance(example, Conversation):
            if not guard.is_clean((example.messages, example.tools)):
                messages, tools = guard.protect_messages(example.messages), guard.protect(example.tools)
                example = replace(example, messages=messages, tools=tools)
            segments = self.template.render(example)
            for segment in segments:
                guard.check(segment.text)
            return segments
        if not guard.is_clean((example.prompt, example.completion)):
            example = PlainText(prompt=guard.protect(example.prompt), completion=guard.protect(example.completion))
        return self.tokenizer.plain_segments(example, self._settings.train_on)

    def _check_ids(self, encoded: EncodedRows) -> None:
        """Refuse faults of the tokenizer or template: a doubled BOS token, or a padding token that is trained."""
        tokenizer, pad, ids = self.tokenizer, self.tokenizer.pad, encoded.ids
        starts = encoded.offsets[:-1][encoded.lengths > 1]
        if (
            tokenizer.bos_id is not None
            and ((ids[starts] == tokenizer.bos_id) & (ids[starts + 1] == tokenizer.bos_id)).any()
        ):
            raise UserError(
                f"data.chat_template: a row begins with two {tokenizer.special_tokens['bos_token']}, so the model "
                "would learn a start that it never gets at inference; remove one from the template or the rows"
            )
        if not pad.is_spare or not (found := np.flatnonzero(ids == pad.number)).size:
            return
        row = np.searchsorted(encoded.offsets, found, side="right") - 1
        # With spans as indices into all ids, an index is inside one if more spans began than ended before it.
        spans = encoded.spans + encoded.offsets[encoded.span_rows][:, None]
        begun = np.searchsorted(spans[:, 0], found, side="right")
        ended = np.searchsorted(spans[:, 1], found, side="right")
        if (begun > ended).any():
            raise UserError(
                f"model.name: token {pad.number} pads rows ({pad.reason}), yet it is trained in row "
                f"{row[begun > ended][0]} of a block; name another pad_token in tokenizer_config.json"
            )

    def _sample(self, rows: _Rows, encoded: EncodedRows) -> None:
        """Encode some rows as one text too, to count those whose ids differ because a token would cross segments."""
        for number in range(0, len(rows.segments), ROWS_PER_SAMPLED_ROW):
            ids = encoded.ids[encoded.offsets[number] : encoded.offsets[number + 1]]
            differs = self.tokenizer.differs_as_a_whole(rows.segments[number], ids)
            if differs is not None:
                rows.count("sampled_rows", rows.places[number])
                rows.count("sampled_rows_differing", rows.places[number], int(differs))

    def _count_limited(self, chunks: Chunks, rows: _Rows, encoded: EncodedRows) -> None:
        """Count the effects of data.max_length, and the rows that the engine could not encode."""
        limit = f"data.max_length={self._settings.max_length}"
        changed = {
            "truncated_rows": chunks.truncated.tolist(),
            "split_rows": chunks.split.tolist(),
            "engine_fallback_rows": sorted(encoded.failed),
        }
        for name, numbers in changed.items():
            for place in rows.places_of(numbers):
                rows.count(name, place)
        for place in rows.places_of(chunks.dropped_long.tolist()):
            rows.reject("dropped_long_rows", place, f"longer than {limit}")
        cut = {number: self._cut_value(number, rows, encoded) for number in chunks.no_answer.tolist()}
        for place in rows.places_of(number for number, found in cut.items() if found is None):
            rows.reject("no_answer_rows", place, f"no answer is left within {limit}")
        for number, found in cut.items():
            if found is not None:
                rows.reject(found[0], rows.places[number], found[1])

    def _complete_pairs(self, chunks: Chunks, rows: _Rows, encoded: EncodedRows) -> Chunks:
        """The chunks of pairs whose answers are both left, and differ."""
        both = np.isin(chunks.rows ^ 1, chunks.rows)
        chunks = chunks.select(both)
        ends = (chunks.starts + chunks.lengths).tolist()
        parts = [encoded.ids[start:end] for start, end in zip(chunks.starts.tolist(), ends, strict=True)]
        same = np.array([np.array_equal(*pair) for pair in zip(parts[::2], parts[1::2], strict=True)], bool)
        for number in chunks.rows[::2][same].tolist():
            if {number, number + 1} & set(chunks.truncated.tolist()):
                name, where = "no_answer_rows", f"within data.max_length={self._settings.max_length}"
            else:  # A template may remove spaces, and a lone surrogate is no character.
                name, where = "bad_rows", "as tokens, so there is no preference; remove the row"
            rows.reject(name, rows.places[number], f"both answers of the pair are the same {where}")
        return chunks.select(~np.repeat(same, 2))

    def _complete_values(self, chunks: Chunks, rows: _Rows, encoded: EncodedRows) -> Chunks:
        """The chunks of rows whose values are not cut."""
        cut = np.zeros(len(chunks.rows), bool)
        for place, one in enumerate(self._attached):
            lacks = one.cut(chunks, encoded, rows.values(place, range(len(rows.carried))))
            for number in dict.fromkeys(chunks.rows[lacks & ~cut].tolist()):
                name, reason = self._cut_value(number, rows, encoded) or (one.cut_count, one.cut_apart)
                rows.reject(name, rows.places[number], reason)
            cut |= lacks
        return chunks.select(~cut) if cut.any() else chunks

    def _cut_value(self, number: int, rows: _Rows, encoded: EncodedRows) -> tuple[str, str] | None:
        """(name of the count, how) of a row that carries what data.max_length cuts; None for others."""
        ids = encoded.ids[encoded.offsets[number] : encoded.offsets[number + 1]]
        for one, value in zip(self._attached, rows.carried[number], strict=True):
            if (reason := one.cut_reason(value, ids, self._settings.max_length)) is not None:
                return one.cut_count, reason
        return None

    def _side(self, chunks: Chunks, encoded: EncodedRows, rows: _Rows) -> SideTokens:
        """The tokens of one side of the split."""
        numbers, ids = np.array([number for number, _ in rows.places], np.uint32), encoded.ids
        for one in self._attached:
            chunks, ids = one.with_untrained(chunks, ids, self._settings.max_length)
        attached = [(one, rows.values(place, chunks.rows.tolist())) for place, one in enumerate(self._attached)]
        columns = [column for one, own in attached for column in one.arrays(own)]
        batch = record_batch(self._schema, chunks, ids, rows.families, rows.block.file, numbers, columns)
        digest = np.zeros(0, np.uint64)
        if self._settings.drop_duplicates:
            digest = digests(batch, rows.kind, ([one.digest(value) for value in own] for one, own in attached))
        carried = [pair for one, own in attached for pair in zip(one.index_fields, one.index_arrays(own), strict=True)]
        return SideTokens(batch, chunks.supervised.astype(np.int32), digest, tuple(carried))
