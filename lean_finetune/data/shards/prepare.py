"""What has to be known before the first block is tokenized: each source's shape, the template, the engine, the key."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lean_finetune.config.data_schema import Data
from lean_finetune.core.errors import UserError
from lean_finetune.data.chat.control_tokens import Guard
from lean_finetune.data.encode.engine_choice import Opened, choose_engine
from lean_finetune.data.format.row_formats import Conversation, RowFault, check_columns, detect_format, parse_row
from lean_finetune.data.format.token_settings import Settings, SourceShape
from lean_finetune.data.format.unread_columns import MEANINGFUL, without
from lean_finetune.data.read.decode_rows import decode
from lean_finetune.data.read.row_block import RawRow
from lean_finetune.data.read.source_blocks import file_names, read_blocks
from lean_finetune.data.shards.work_key import key_of, made_of
from lean_finetune.pinning.descriptions import is_heldout_source
from lean_finetune.pinning.locate import template_file

AUTO = "auto"
# Of each source, to compare the engines on; their probe corpus holds the hard cases.
SAMPLED_ROWS_PER_SOURCE = 128
SAMPLED_CHARACTERS_PER_SOURCE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Job:
    """All that the tokens depend on, and what was chosen on the way."""

    data_lock: Mapping[str, Any]
    tokenizer_lock: Mapping[str, Any]
    settings: Settings
    max_rows: int | None
    format_reasons: tuple[str, ...]
    """By source."""
    has_conversations: bool
    """Whether a source has rows for the chat template."""
    engine_reason: str
    opened: Opened
    """The tokenizer with that engine, for the first who uses it."""
    file_names: Sequence[str]
    """By Block.file."""
    made_of: Mapping[str, str]

    @property
    def key(self) -> str:
        """Equal for equal bytes of data/tokens."""
        return key_of(self.made_of)

    def notes(self) -> list[str]:
        """Which shape each source was found to have, and why."""
        chosen = []
        for source, shape, reason in zip(
            self.data_lock["sources"], self.settings.sources, self.format_reasons, strict=True
        ):
            of = "" if len(self.settings.sources) == 1 else f" for {source['source']}"
            chosen.append(f"data.format is {shape.format}{of}: {reason}")
        return chosen

    def engine_note(self) -> str:
        """What encodes the text, and why."""
        return f"run.tokenizer_engine is {self.settings.engine}: {self.engine_reason}"


def plan_job(
    data: Data, engine: str, data_lock: Mapping[str, Any], tokenizer_lock: Mapping[str, Any], directory: Path
) -> Job:
    """Look at the first rows of each source and settle everything.

    Raises:
        UserError: a source holds no rows, its first row has no known shape, or the engine that was asked for would
            change ids.
    """
    names = file_names(data_lock)
    resolved = [_resolve(data, data_lock, place) for place in range(len(data_lock["sources"]))]
    _check_ignored(data.ignore_columns or [], resolved)
    chosen = choose_engine(engine, directory, [text for one in resolved for text in one.texts])
    settings = Settings(
        tokenizer_directory=directory,
        sources=tuple(one.shape for one in resolved),
        ignore_columns=tuple(data.ignore_columns or ()),
        files=len(names),
        chat_template=_template_text(data.chat_template, data_lock),
        template_date=data.template_date,
        train_on=data.train_on,
        max_length=data.max_length,
        over_length=data.over_length,
        on_bad_row=data.on_bad_row,
        drop_duplicates=data.drop_duplicates,
        heldout_fraction=data.heldout_fraction,
        heldout_seed=data.heldout_seed,
        engine=chosen.name,
    )
    return Job(
        data_lock=data_lock,
        tokenizer_lock=tokenizer_lock,
        settings=settings,
        max_rows=data.max_rows,
        format_reasons=tuple(one.reason for one in resolved),
        has_conversations=any(one.has_conversations for one in resolved),
        engine_reason=chosen.reason,
        opened=chosen.opened,
        file_names=names,
        made_of=made_of(data_lock, tokenizer_lock, settings, data.max_rows),
    )


def _template_text(chat_template: str, data_lock: Mapping[str, Any]) -> str:
    """The name of a known template, or the text of the user's file as it was pinned."""
    path = template_file(chat_template)
    if path is None:
        return chat_template
    try:
        content = path.read_bytes()
        text = content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"data.chat_template: {path} cannot be read ({getattr(error, 'strerror', None) or error}); save it as "
            "UTF-8 where you may read it"
        ) from None
    if hashlib.sha256(content).hexdigest() != data_lock["chat_template_sha256"]:
        raise UserError(f"data.chat_template: {path} changed since it was pinned; run `dvc repro` again")
    return text


@dataclass(frozen=True, kw_only=True)
class _Resolved:
    """What the first rows of a source say."""

    shape: SourceShape
    reason: str
    has_conversations: bool
    texts: list[str]
    """Some of its text."""
    ignored: set[str]
    """Columns of `data.ignore_columns` that its first rows have."""


def _check_ignored(names: Sequence[str], sources: Sequence[_Resolved]) -> None:
    """Refuse a column that is ignored and that no row has, where ignoring it could not have an effect later either.

    Raises:
        UserError: naming the column.
    """
    found = MEANINGFUL.union(*(source.ignored for source in sources))
    if unknown := [name for name in names if name not in found]:
        raise UserError(f"data.ignore_columns: the rows have no column {unknown[0]!r}; remove it from the list")


def _resolve(data: Data, lock: Mapping[str, Any], place: int) -> _Resolved:
    """Look at a source's first rows."""
    source = lock["sources"][place]
    columns = source["columns"] if source["columns"] is not None else (data.columns or {})
    wanted = source["format"] if source["format"] is not None else data.format
    skips = data.on_bad_row == "skip"
    alone = {**lock, "sources": [source]}
    rows, fault = _first_rows(alone, file_names(alone), skips)
    if fault is not None and not rows:
        raise UserError(f"{fault} (and no other row of {source['source']} can be read)")
    if not rows:
        raise UserError(f"data.source: {source['source']} holds no rows; put rows into it or name another source")
    given = {key for _, row in rows for key in row.value or ()}
    rows = [(at, row._replace(value=without(row.value or {}, data.ignore_columns or ()))) for at, row in rows]
    if wanted == AUTO:
        wanted, reason = _detect(rows, columns, skips)
    else:
        check_columns(wanted, columns)
        reason = "params.yaml says so"
    shape = SourceShape(format=wanted, columns=columns, is_heldout=is_heldout_source(source))
    return _Resolved(
        shape=shape,
        reason=reason,
        has_conversations=_are_conversations(rows, shape),
        texts=_texts([row for _, row in rows]),
        ignored=given & set(data.ignore_columns or ()),
    )


def _detect(rows: list[tuple[str, RawRow]], columns: Mapping[str, str], skips: bool) -> tuple[str, str]:
    """(shape, why) of the first row, or, when bad rows are skipped, of the first that has one."""
    for number, (at, row) in enumerate(rows, start=1):
        assert row.value is not None, "a row without a fault has a value"
        try:
            return detect_format(row.value, columns)
        except RowFault as fault:
            if not skips or number == len(rows):
                raise UserError(f"{at}: {fault}") from None
    raise AssertionError("the last row either had a shape or was told")


def _are_conversations(rows: list[tuple[str, RawRow]], shape: SourceShape) -> bool:
    """Whether the first row that can be used is for the chat template; all rows of a source are of one kind."""
    for _, row in rows:
        assert row.value is not None, "a row without a fault has a value"
        try:
            return isinstance(parse_row(row.value, shape), Conversation)
        except (RowFault, RecursionError):  # told with its place when the row is tokenized
            continue
    return False


def _first_rows(
    lock: Mapping[str, Any], names: Sequence[str], skips: bool
) -> tuple[list[tuple[str, RawRow]], str | None]:
    """(the rows without a fault of the first block that has one, each with its place; the first fault before them)."""
    fault = None
    for block in read_blocks(lock, max_rows=None, progress=lambda _: None):
        good = []
        for row in decode(block):
            at = f"{names[block.file]}:{row.line}"
            if row.fault is None:
                good.append((at, row))
            elif not skips and not good:
                raise UserError(f"{at}: {row.fault}")
            elif fault is None:
                fault = f"{at}: {row.fault}"
        if good:
            return good, fault
    return [], fault


def _texts(rows: Sequence[RawRow]) -> list[str]:
    """Strings of the first rows, up to a bound, as an encoder takes them."""
    texts: list[str] = []
    guard = Guard([])
    room = SAMPLED_CHARACTERS_PER_SOURCE
    for row in rows[:SAMPLED_ROWS_PER_SOURCE]:
        for text in _strings(row.value):
            texts.append(guard.clean(text[:room]))
            room -= len(text)
            if room <= 0:
                return texts
    return texts


def _strings(value: Any) -> Iterator[str]:
    """All strings in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)
