"""Preparation of a tokenize job: the format of each source, the chat template, the engine, and the key."""

import hashlib
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lean_finetune.config.data_schema import Data
from lean_finetune.core.atomic_files import sha256_json
from lean_finetune.core.errors import RowFault, UserError
from lean_finetune.data.chat.chat_template import ChatTemplate
from lean_finetune.data.encode.tokenizer_engine import choose_engine
from lean_finetune.data.format.format_base import (
    AUTO,
    Conversation,
    SourceFormat,
    check_columns,
    check_kind,
    complete_columns,
    detect_format,
    parts_of,
)
from lean_finetune.data.format.given_images import IMAGE_COLUMNS
from lean_finetune.data.format.messages import ROLES_KEY
from lean_finetune.data.format.row_formats import parse_row
from lean_finetune.data.format.unread_columns import MEANINGFUL, unread_columns, without
from lean_finetune.data.read.decode_rows import decode
from lean_finetune.data.read.source_blocks import file_names, read_blocks
from lean_finetune.data.read.worker_memory import return_freed_memory
from lean_finetune.data.shards.tokenize_block import BlockTokenizer, TokenSettings
from lean_finetune.islands.columns import carried_keys, columns_of, model_takes_others
from lean_finetune.objectives.row_kind import RowKind
from lean_finetune.pinning.code import code_hashes
from lean_finetune.pinning.locate import (
    NO_FILES,
    FileVersions,
    data_files,
    is_heldout_source,
    rows_directory,
    template_file,
)
from lean_finetune.rows.columns import InspectedRows

TOKENIZE_MODULE = "lean_finetune.data.shards.tokenize_run"
"""Module whose imports are the code that makes tokens."""
LIBRARIES = ("jinja2", "numpy", "orjson", "pyarrow", "tiktoken", "tokenizers")
KEY_DIGITS = 32
# Text of each source on which the engines are compared, besides the probe texts.
SAMPLED_ROWS_PER_SOURCE = 128
SAMPLED_CHARACTERS_PER_SOURCE = 1 << 20
SAME_SETTINGS = {
    *("template_date", "train_on", "end_of_turn", "max_length", "over_length", "on_bad_row", "drop_duplicates"),
    *("heldout_fraction", "heldout_seed"),
}
"""Parameters of section `data` that are fields of TokenSettings."""


@dataclass(frozen=True, kw_only=True)
class TokenizeJob:
    """Everything that the tokens depend on, and the choices made for it."""

    data: Data
    data_lock: Mapping[str, Any]
    settings: TokenSettings
    format_reasons: tuple[str, ...]
    """By source."""
    engine_reason: str
    tokenizer: BlockTokenizer
    """Loading it takes as long as thousands of rows, so it is done once."""
    template: ChatTemplate | None
    """None where no source has rows for it."""
    file_names: Sequence[str]
    """By RowBlock.file."""
    inputs: Mapping[str, str]
    """See `token_inputs`."""
    tokenizer_files: FileVersions = NO_FILES
    """The pinned files that workers read again."""
    directories: tuple[Path | None, ...] = ()
    """The directory of each file, in which rows name others; None for a file on the hub. By RowBlock.file."""

    @property
    def key(self) -> str:
        """Equal for equal bytes of data/tokens."""
        return sha256_json(dict(self.inputs))[:KEY_DIGITS]

    def notes(self) -> list[str]:
        """The engine, the format of each source, how its trained text is found, and the reasons."""
        sources = zip(self.data_lock["sources"], self.settings.sources, self.format_reasons, strict=True)
        name = "" if len(self.settings.sources) == 1 else " for {}"
        notes = [f"run.tokenizer_engine is {self.settings.engine}: {self.engine_reason}"]
        notes += [
            f"data.format is {one.format}{name.format(source['source'])}: {reason}" for source, one, reason in sources
        ]
        if self.template is not None:
            notes.append(f"trained text is found by {self.template.method}: {self.template.reason}")
            if self.template.end_reason:
                notes.append(f"data.end_of_turn is {self.settings.end_of_turn}: {self.template.end_reason}")
        return notes


def prepare_job(
    data: Data,
    engine: str,
    data_lock: Mapping[str, Any],
    tokenizer_lock: Mapping[str, Any],
    directory: Path,
    *,
    kind: RowKind = RowKind.ANSWER,
    scored: bool = False,
) -> TokenizeJob:
    """Read the first rows of each source and make all choices; `engine` is run.tokenizer_engine.

    `kind` is what the rows are for the objective, and `scored` says whether it trains a reward model.

    Raises UserError if a source has no rows, its first row has no known format, the requested engine would change ids,
    or the chat template cannot be used.
    """
    return_freed_memory()
    names = file_names(data_lock)
    takes_others = model_takes_others(directory)
    sources = range(len(data_lock["sources"]))
    inspected = [_inspect(data, data_lock, index, kind, takes_others, scored) for index in sources]
    formats = tuple(one.source_format for one in inspected)
    attached = columns_of(InspectedRows(data=data, tokenizer_lock=tokenizer_lock, kind=kind, sources=formats))
    ignored = tuple(data.ignore_columns or ())
    # A later row may be the first to have a column that changes its meaning, or that the format reads.
    found = MEANINGFUL.union(*(one.columns | one.source_format.columns_read for one in inspected))
    if unknown := [name for name in ignored if name not in found]:
        raise UserError(f"data.ignore_columns: the rows have no column {unknown[0]!r}; remove it from the list")
    chosen = choose_engine(engine, directory, [text for one in inspected for text in one.texts])
    settings = TokenSettings(
        tokenizer_directory=directory,
        sources=formats,
        ignore_columns=ignored,
        files=len(names),
        chat_template=_template_text(data.chat_template, data_lock),
        stop_ids=tuple(tokenizer_lock["stop_ids"]),
        engine=chosen.name,
        kind=kind,
        attached=attached,
        **{name: getattr(data, name) for name in sorted(SAME_SETTINGS)},
    )
    directories = tuple(map(rows_directory, data_files(data_lock)))
    tokenizer = BlockTokenizer(settings, chosen.engine, directories=directories)
    return TokenizeJob(
        data=data,
        data_lock=data_lock,
        settings=settings,
        format_reasons=tuple(one.reason for one in inspected),
        engine_reason=chosen.reason,
        tokenizer=tokenizer,
        template=tokenizer.template if any(one.has_conversations for one in inspected) else None,
        file_names=names,
        inputs=token_inputs(data_lock, tokenizer_lock, settings, data.max_rows),
        directories=directories,
    )


def token_inputs(
    data_lock: Mapping[str, Any], tokenizer_lock: Mapping[str, Any], settings: TokenSettings, max_rows: int | None
) -> dict[str, str]:
    """By name, what the tokens depend on. The engine is left out: it changes no token."""
    # The tokenizer's file hashes identify it, wherever it is.
    others = ("tokenizer_directory", "engine")
    values = {one.name: getattr(settings, one.name) for one in fields(settings) if one.name not in others}
    values |= {"kind": settings.kind.name, "sources": [_source_values(one) for one in settings.sources]}
    values |= {"attached": [one.inputs for one in settings.attached]}
    libraries = (*LIBRARIES, *(name for one in settings.attached for name in one.libraries))
    return {
        "data": sha256_json(data_lock),
        "tokenizer": sha256_json(tokenizer_lock["files"]),
        "parameters": sha256_json({**values, "max_rows": max_rows}),
        "code": sha256_json(code_hashes(TOKENIZE_MODULE)),
        "libraries": ", ".join(
            [f"python {platform.python_version()}", *(f"{name} {version(name)}" for name in libraries)]
        ),
    }


def _source_values(source: SourceFormat) -> dict[str, Any]:
    """What the tokens depend on of a source's format."""
    return {**asdict(source), "kind": source.kind.name}


def _template_text(chat_template: str, data_lock: Mapping[str, Any]) -> str:
    """The name of a known template, or the text of the user's file, compared with its pinned hash."""
    path = template_file(chat_template)
    if path is None:
        return chat_template
    try:
        content = path.read_bytes()
        text = content.decode("utf-8-sig")
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
    columns: set[str]


_PlacedRow = tuple[str, dict[str, Any]]
"""(file:line, value) of a readable row."""


def _inspect(
    data: Data, lock: Mapping[str, Any], index: int, kind: RowKind, takes_others: bool, scored: bool
) -> _InspectedSource:
    """Read the first rows of a source for a model of text alone, or of more."""
    source = lock["sources"][index]
    columns = dict(source["columns"] if source["columns"] is not None else (data.columns or {}))
    roles = columns.pop(ROLES_KEY, {})
    wanted = source["format"] if source["format"] is not None else data.format
    skips = data.on_bad_row == "skip"
    # Without their column, a place for something else is text.
    text_alone = IMAGE_COLUMNS[0] not in columns and not set(IMAGE_COLUMNS).isdisjoint(data.ignore_columns or ())
    takes_others = takes_others and not text_alone
    rows, fault = _first_rows({**lock, "sources": [source]}, skips)
    if not rows:
        if fault is not None:
            raise UserError(f"{fault} (and no other row of {source['source']} can be read)")
        raise UserError(f"data.source: {source['source']} holds no rows; put rows into it or name another source")
    present = {key for _, row in rows for key in row}
    rows = [(place, without(row, data.ignore_columns or ())) for place, row in rows]
    if wanted == AUTO:
        wanted, columns, reason = _detect(rows, columns, skips, kind)
    else:
        check_kind(wanted, kind)
        check_columns(columns, wanted, kind, carried_keys(kind))
        reason = "params.yaml says so"
    source_format = SourceFormat(
        format=wanted,
        columns=columns,
        roles=roles,
        is_heldout=is_heldout_source(source),
        kind=kind,
        takes_others=takes_others,
        scored=scored,
        carried=tuple(key for key in carried_keys(kind) if key in columns),
    )
    return _InspectedSource(
        source_format=source_format,
        reason=reason,
        has_conversations=_has_conversations(rows, source_format),
        texts=_texts(rows),
        columns=present,
    )


def needs_objective(data: Data, lock: Mapping[str, Any], kind: RowKind) -> str | None:
    """The line in which stage tokenize will name another train.objective for the first rows; None if it will not.

    Raises:
        UserError: a row before them cannot be read.
    """
    rows, _ = _first_rows(lock, skips=False)
    given = {key: value for key, value in (data.columns or {}).items() if key != ROLES_KEY}
    for place, row in rows[:SAMPLED_ROWS_PER_SOURCE]:
        try:
            columns = complete_columns(row, given, kind)
            name, _ = detect_format(row, columns, kind, carried_keys(kind))
            unread_columns(row, SourceFormat(format=name, columns=columns, kind=kind))
        except RowFault as fault:
            return f"{place}: {fault}" if "train.objective" in str(fault) else None
    return None


def _detect(
    rows: list[_PlacedRow], given: Mapping[str, str], skips: bool, kind: RowKind
) -> tuple[str, dict[str, str], str]:
    """(format, columns, reason) of the first row, or, with on_bad_row: skip, of the first one of a known format.

    `given` are the columns that params.yaml names.
    """
    for place, row in rows if skips else rows[:1]:
        try:
            columns = dict(complete_columns(row, given, kind))
            name, reason = detect_format(row, columns, kind, carried_keys(kind))
            return name, columns, reason
        except RowFault as fault:
            refusal = UserError(f"{place}: {fault}")
    raise refusal


def _has_conversations(rows: list[_PlacedRow], source_format: SourceFormat) -> bool:
    """Whether the first usable row is for the chat template. All rows of a source are of one kind."""
    for _, row in rows:
        try:
            return isinstance(parts_of(parse_row(row, source_format))[0], Conversation)
        except (RowFault, RecursionError):  # Reported with its place when the row is tokenized.
            continue
    return False


def _first_rows(lock: Mapping[str, Any], skips: bool) -> tuple[list[_PlacedRow], str | None]:
    """(the readable rows of the first block that has any, the first fault before them)."""
    names, fault = file_names(lock), None
    for block in read_blocks(lock, max_rows=None, progress=lambda _: None):
        good: list[_PlacedRow] = []
        for row in decode(block):
            place = f"{names[block.file]}:{row.line}"
            if row.value is not None:
                good.append((place, row.value))
            elif not skips and not good:
                raise UserError(f"{place}: {row.fault}")
            elif fault is None:
                fault = f"{place}: {row.fault}"
        if good:
            return good, fault
    return [], fault


def _texts(rows: Sequence[_PlacedRow]) -> list[str]:
    """Strings of the first rows, up to a limit."""
    texts: list[str] = []
    room = SAMPLED_CHARACTERS_PER_SOURCE
    for text in (text for _, row in rows[:SAMPLED_ROWS_PER_SOURCE] for text in _strings(row)):
        if room <= 0:
            break
        texts.append(text[:room])
        room -= len(text)
    return texts


def _strings(value: Any) -> Iterator[str]:
    """All strings in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)
