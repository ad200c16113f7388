"""Data sets that LLaMA-Factory's dataset_info.json describes, as entries of `data.source`."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lean_finetune.islands.columns  # noqa: F401 - registers the formats of rows
from lean_finetune.commands.convert.objectives import PRETRAINING
from lean_finetune.config.other_tools import Table, of_objectives
from lean_finetune.core.errors import UserError
from lean_finetune.data.format.format_base import FORMATS
from lean_finetune.islands.objectives.registry import OBJECTIVES, SFT
from lean_finetune.pinning.config_file import NotAnObject, read_object

FILE = "dataset_info.json"
DEFAULT_COLUMNS = {
    "alpaca": {"instruction": "instruction", "input": "input", "output": "output"},
    "sharegpt": {"conversations": "conversations"},
    "openai": {"messages": "conversations"},
}
"""Our key for each column that is read where an entry names none, by `formatting`."""
OUR_KEYS = {
    "alpaca": {"prompt": "instruction", "query": "input", "response": "output", "history": "history"},
    "sharegpt": {"messages": "conversations"},
    "openai": {"messages": "messages"},
}
SHARED_KEYS = {"system": "system", "tools": "tools"}
NAMED_FORMATS = {"openai": "messages"}
"""Our names of formats that differ."""
TAGS = {
    "role_tag": ("from", "role"),
    "content_tag": ("value", "content"),
    "user_tag": ("human", "user"),
    "assistant_tag": ("gpt", "assistant", "model"),
    "observation_tag": ("observation", "tool", "function_response"),
    "function_tag": ("function_call", "tool_call"),
    "system_tag": ("system",),
}
"""Values that our row formats recognise without a setting."""
REFUSED = {
    "script_url": "scripts that make data are not run; save their rows as a file",
    "cloud_file_name": "download the file and name it in file_name",
    "folder": "a folder of a hub repository cannot be named here; download it and name it in file_name",
}
MEDIA_COLUMNS = ("videos", "audios")
PAIR_COLUMNS = ("chosen", "rejected")
TOOL = "llama_factory"
"""Its name in the tables."""
TEXT = (SFT, PRETRAINING)
"""Objectives without preferences: LLaMA-Factory's stages of supervised fine-tuning and of plain text."""


def check_kind(name: str, file: Path, objective: str) -> None:
    """Refuse a data set of a dataset_info.json that has images, or that is not for the objective.

    Raises:
        UserError: it is of such a kind.
    """
    reasons: list[str] = []
    with suppress(ValueError, LookupError, TypeError, AttributeError):  # read_sources names it.
        reasons = _wrong_kind(read_object(file)[name], objective)
    if reasons:
        raise UserError(f"{file}: {name}: {reasons[0]}")


def _wrong_kind(entry: Mapping[str, Any], objective: str) -> list[str]:
    """Why a data set is not for the objective."""
    columns = entry.get("columns") or {}
    if objective in TEXT:
        preferences = ["ranking"] if entry.get("ranking") else []
        preferences += [f"columns.{key}" for key in (*PAIR_COLUMNS, *_label_columns()) if columns.get(key)]
        *stages, last = sorted(one["names"]["stage"] for one in _known() if "stage" in one.get("names", {}))
        wanted = f"{', '.join(stages)} or {last}"
        reasons = [f"{key}: preferences need a stage that trains them ({wanted})" for key in preferences]
    elif OBJECTIVES[objective].kind.labels:
        label = of_objectives()[objective][TOOL]["label"]
        needed = f"columns.{label}: must name the column of the labels, for {objective}"
        reasons = [] if columns.get(label) else [needed]
    else:
        reasons = [] if entry.get("ranking") else [f"ranking: must be true, for pairs of {objective}"]
    media = [key for key in (*MEDIA_COLUMNS, *(() if objective == SFT else ("images",))) if columns.get(key)]
    return reasons + [f"columns.{key}: is not trained here with objective {objective}" for key in media]


def _known() -> list[Table]:
    """What the tool calls each objective of preferences that it has."""
    return [one[TOOL] for one in of_objectives().values() if TOOL in one]


def _label_columns() -> list[str]:
    """The tool's names of columns with labels."""
    return [one["label"] for one in _known() if "label" in one]


@dataclass(frozen=True, kw_only=True)
class Described:
    """A data set, as an entry of `data.source`."""

    name: str
    source: dict[str, Any]
    read: frozenset[str]
    """Its columns that the tool reads; empty where they are not known."""
    template: str | None = None
    """The tool's name of its chat template, if it has one of its own."""

    @property
    def unread(self) -> frozenset[str]:
        """Columns that it does not read, and that our format would where rows have them."""
        columns = self.source.get("columns", {})
        keys = FORMATS[self.source["format"]].keys - {"family"} if "format" in self.source else ()
        return frozenset(columns.get(key, key) for key in keys) - self.read


def read_sources(names: Sequence[str], file: Path, objective: str) -> list[Described]:
    """The data sets with these names. `objective` is ours, or pt for plain text.

    Raises:
        UserError: an entry is missing, or says what cannot be done here.
    """
    try:
        entries = read_object(file)
        return [_described(name, entries[name], f"{file}: {name}", file.parent, objective) for name in names]
    except NotAnObject as error:
        raise UserError(f"{file}: {error}; correct it") from None
    except (ValueError, TypeError, AttributeError):
        raise UserError(f"{file}: must describe data sets as LLaMA-Factory does; correct it") from None
    except KeyError as error:
        raise UserError(f"{file}: has no data set {error}, which the configuration names; add it") from None


def columns_to_ignore(found: Sequence[Described]) -> tuple[list[str], list[str]]:
    """data.ignore_columns for data sets, and where one is read otherwise: the parameter is one for all of them."""
    read = {column: one.name for one in found for column in one.read}
    ignored = {column for one in found for column in one.unread if column not in read}
    notes = [
        f"{one.name}: its column {column} is read here if it has one, since {read[column]} needs it"
        for one in found
        for column in sorted(one.unread)
        if column in read
    ]
    return sorted(ignored), notes


def _described(name: str, entry: Mapping[str, Any], where: str, directory: Path, objective: str) -> Described:
    """A data set of the file."""
    columns, formatting = entry.get("columns") or {}, entry.get("formatting") or "alpaca"
    refused = [f"{key}: {reason}" for key, reason in REFUSED.items() if entry.get(key)]
    refused += _wrong_kind(entry, objective)
    refused += [
        f"tags.{tag}: must be {' or '.join(TAGS[tag])}; got {value}"
        for tag, value in (entry.get("tags") or {}).items()
        if value not in TAGS.get(tag, ())
    ]
    if formatting not in OUR_KEYS:
        refused.append(f"formatting: must be {', '.join(OUR_KEYS)}; got {formatting}")
    if "hf_hub_url" in entry:
        place = f"hf://{entry['hf_hub_url']}"
    elif "file_name" in entry:
        place = str(directory / entry["file_name"])
        if not os.path.exists(place):
            refused.append(f"file_name: {place} does not exist")
    else:
        refused.append("must have hf_hub_url or file_name; other places are not read here")
    if refused:
        raise UserError(f"{where}: {refused[0]}")
    row_format, read = _columns(columns, formatting, objective, where)
    found = {
        "source": place,
        "config": entry.get("subset"),
        "split": entry.get("split"),
        "format": row_format,
        "columns": {key: column for key, column in read.items() if key != column},
        "rows": entry.get("num_samples"),
    }
    source = {key: value for key, value in found.items() if value}
    return Described(name=name, source=source, read=frozenset(read.values()))


def _columns(columns: Mapping[str, str], formatting: str, objective: str, where: str) -> tuple[str, dict[str, str]]:
    """Our format, and the column of each of its keys."""
    if objective not in TEXT:
        keys = {**OUR_KEYS[formatting], **SHARED_KEYS, **{key: key for key in PAIR_COLUMNS}}
        labels, label_columns = OBJECTIVES[objective].kind.labels, _label_columns()
        named = {keys[name]: column for name, column in columns.items() if column and name not in label_columns}
        label = next((columns[name] for name in label_columns if name in columns), None)
        named |= {} if label is None or label in labels else {labels[0]: label}
        suffix = "" if labels else "_preference"
        return f"{NAMED_FORMATS.get(formatting, formatting)}{suffix}", named or DEFAULT_COLUMNS[formatting]
    if objective == PRETRAINING or (formatting == "alpaca" and columns and "response" not in columns):
        if formatting != "alpaca" or "response" in columns or not columns:
            raise UserError(f"{where}: stage pt trains the column of columns.prompt alone; name only that one")
        return "text", {"text": columns["prompt"]}
    keys = {**OUR_KEYS[formatting], **SHARED_KEYS, "images": "images"}
    named = {keys[name]: column for name, column in columns.items() if column}
    return NAMED_FORMATS.get(formatting, formatting), named or DEFAULT_COLUMNS[formatting]
