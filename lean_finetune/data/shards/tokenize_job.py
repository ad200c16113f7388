"""Preparation of a tokenize job: the format of each source, the chat template, the engine, and the key."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lean_finetune.config.data_schema import Data
from lean_finetune.core.errors import UserError
from lean_finetune.data.chat.control_tokens import Guard
from lean_finetune.data.encode.engine_choice import LoadedTokenizer, choose_engine
from lean_finetune.data.format.example import Conversation, RowFault
from lean_finetune.data.format.format_base import AUTO, FORMATS, SourceFormat, detect_format
from lean_finetune.data.format.row_formats import parse_row
from lean_finetune.data.format.unread_columns import MEANINGFUL, without
from lean_finetune.data.read.decode_rows import decode
from lean_finetune.data.read.source_blocks import file_names, read_blocks
from lean_finetune.data.shards.token_settings import TokenSettings, input_key, token_inputs
from lean_finetune.pinning.descriptions import is_heldout_source
from lean_finetune.pinning.locate import template_file

# Text of each source on which the engines are compared, besides the probe texts.
SAMPLED_ROWS_PER_SOURCE = 128
SAMPLED_CHARACTERS_PER_SOURCE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class TokenizeJob:
    """Everything that the tokens depend on, and the choices made for it."""

    data_lock: Mapping[str, Any]
    tokenizer_lock: Mapping[str, Any]
    settings: TokenSettings
    max_rows: int | None
    format_reasons: tuple[str, ...]
    """By source."""
    has_conversations: bool
    """Whether any source has rows for the chat template."""
    engine_reason: str
    loaded: LoadedTokenizer
    """The tokenizer with the chosen engine. Loading it takes as long as thousands of rows, so it is done once."""
    file_names: Sequence[str]
    """By RowBlock.file."""
    inputs: Mapping[str, str]
    """See `token_inputs`."""

    @property
    def key(self) -> str:
        """Equal for equal bytes of data/tokens."""
        return input_key(self.inputs)

    def notes(self) -> list[str]:
        """The format of each source, and the reason."""
        sources = zip(self.data_lock["sources"], self.settings.sources, self.format_reasons, strict=True)
        name = "" if len(self.settings.sources) == 1 else " for {}"
        return [
            f"data.format is {one.format}{name.format(source['source'])}: {reason}" for source, one, reason in sources
        ]

    def engine_note(self) -> str:
        """The engine, and the reason."""
        return f"run.tokenizer_engine is {self.settings.engine}: {self.engine_reason}"


def prepare_job(
    data: Data, engine: str, data_lock: Mapping[str, Any], tokenizer_lock: Mapping[str, Any], directory: Path
) -> TokenizeJob:
    """Read the first rows of each source and make all choices.

    Args:
        data: section `data` of params.yaml.
        engine: run.tokenizer_engine.
        data_lock: the content of locks/data.json.
        tokenizer_lock: the content of locks/tokenizer.json.
        directory: the tokenizer's.

    Raises:
        UserError: a source has no rows, its first row has no known format, or the requested engine would change ids.
    """
    names = file_names(data_lock)
    inspected = [_inspect(data, data_lock, index) for index in range(len(data_lock["sources"]))]
    _check_ignored(data.ignore_columns or [], inspected)
    chosen = choose_engine(engine, directory, [text for one in inspected for text in one.texts])
    settings = TokenSettings(
        tokenizer_directory=directory,
        sources=tuple(one.source_format for one in inspected),
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
    return TokenizeJob(
        data_lock=data_lock,
        tokenizer_lock=tokenizer_lock,
        settings=settings,
        max_rows=data.max_rows,
        format_reasons=tuple(one.reason for one in inspected),
        has_conversations=any(one.has_conversations for one in inspected),
        engine_reason=chosen.reason,
        loaded=chosen.loaded,
        file_names=names,
        inputs=token_inputs(data_lock, tokenizer_lock, settings, data.max_rows),
    )


def _template_text(chat_template: str, data_lock: Mapping[str, Any]) -> str:
    """The name of a known template, or the text of the user's file, compared with its pinned hash."""
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
class _InspectedSource:
    """What the first rows of a source show."""

    source_format: SourceFormat
    reason: str
    has_conversations: bool
    texts: list[str]
    """Some of its text."""
    ignored: set[str]
    """Columns of `data.ignore_columns` that its first rows have."""


def _check_ignored(names: Sequence[str], sources: Sequence[_InspectedSource]) -> None:
    """Refuse an ignored column that no row has and that is not one of those refused in later rows."""
    found = MEANINGFUL.union(*(source.ignored for source in sources))
    if unknown := [name for name in names if name not in found]:
        raise UserError(f"data.ignore_columns: the rows have no column {unknown[0]!r}; remove it from the list")


@dataclass(frozen=True, kw_only=True)
class _FirstRow:
    """A readable row and its place as file:line."""

    place: str
    value: dict[str, Any]


def _inspect(data: Data, lock: Mapping[str, Any], index: int) -> _InspectedSource:
    """Read the first rows of a source."""
    source = lock["sources"][index]
    columns = source["columns"] if source["columns"] is not None else (data.columns or {})
    wanted = source["format"] if source["format"] is not None else data.format
    skips = data.on_bad_row == "skip"
    rows, fault = _first_rows({**lock, "sources": [source]}, skips)
    if fault is not None and not rows:
        raise UserError(f"{fault} (and no other row of {source['source']} can be read)")
    if not rows:
        raise UserError(f"data.source: {source['source']} holds no rows; put rows into it or name another source")
    present = {key for row in rows for key in row.value}
    ignored = data.ignore_columns or ()
    rows = [_FirstRow(place=row.place, value=without(row.value, ignored)) for row in rows]
    if wanted == AUTO:
        wanted, reason = _detect(rows, columns, skips)
    else:
        FORMATS[wanted].check_columns(columns)
        reason = "params.yaml says so"
    source_format = SourceFormat(format=wanted, columns=columns, is_heldout=is_heldout_source(source))
    return _InspectedSource(
        source_format=source_format,
        reason=reason,
        has_conversations=_has_conversations(rows, source_format),
        texts=_texts(rows),
        ignored=present & set(ignored),
    )


def _detect(rows: list[_FirstRow], columns: Mapping[str, str], skips: bool) -> tuple[str, str]:
    """(format, reason) of the first row, or, with on_bad_row: skip, of the first row that has a known format."""
    for row in rows:
        try:
            return detect_format(row.value, columns)
        except RowFault as fault:
            if not skips or row is rows[-1]:
                raise UserError(f"{row.place}: {fault}") from None
    raise AssertionError("the last row returned or raised")


def _has_conversations(rows: list[_FirstRow], source_format: SourceFormat) -> bool:
    """Whether the first usable row is for the chat template. All rows of a source are of one kind."""
    for row in rows:
        try:
            return isinstance(parse_row(row.value, source_format), Conversation)
        except (RowFault, RecursionError):  # Reported with its place when the row is tokenized.
            continue
    return False


def _first_rows(lock: Mapping[str, Any], skips: bool) -> tuple[list[_FirstRow], str | None]:
    """(the readable rows of the first block that has any, the first fault before them)."""
    names, fault = file_names(lock), None
    for block in read_blocks(lock, max_rows=None, progress=lambda _: None):
        good = []
        for row in decode(block):
            place = f"{names[block.file]}:{row.line}"
            if row.value is not None:
                good.append(_FirstRow(place=place, value=row.value))
            elif not skips and not good:
                raise UserError(f"{place}: {row.fault}")
            elif fault is None:
                fault = f"{place}: {row.fault}"
        if good:
            return good, fault
    return [], fault


def _texts(rows: Sequence[_FirstRow]) -> list[str]:
    """Strings of the first rows, up to a limit, without lone surrogates."""
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
