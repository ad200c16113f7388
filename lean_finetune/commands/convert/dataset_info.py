"""Data sets of a LLaMA-Factory configuration, by its dataset_info.json, as entries of `data.source`."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lean_finetune.core.errors import UserError
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
OPTIONAL_COLUMNS = ("history", "input", "system", "tools")
FORMATS = {"openai": "messages"}
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
    "ranking": "preference data are not trained here",
    "script_url": "scripts that make data are not run; save their rows as a file",
    "cloud_file_name": "download the file and name it in file_name",
    "folder": "a folder of a hub repository cannot be named here; download it and name it in file_name",
}
REFUSED_COLUMNS = {
    **dict.fromkeys(("images", "videos", "audios"), "only text is trained here"),
    **dict.fromkeys(("chosen", "rejected", "kto_tag"), "preference data are not trained here"),
}


def find_above(name: str, config: Path) -> Path | None:
    """A file that a configuration names, whose path is relative to here or to a folder above the configuration."""
    for start in (Path(), *config.parents):
        with suppress(OSError, ValueError):  # A name of another kind may be too long, or have a null character.
            if (start / name).is_file():
                return start / name
    return None


def check_kind(name: str, file: Path) -> None:
    """Refuse a data set of preferences, or with images, of a dataset_info.json.

    Raises:
        UserError: it is of such a kind.
    """
    reasons: list[str] = []
    with suppress(ValueError, LookupError, TypeError, AttributeError):  # read_sources names it.
        entry = read_object(file)[name]
        columns = entry.get("columns") or {}
        reasons = [f"columns.{key}: {reason}" for key, reason in REFUSED_COLUMNS.items() if columns.get(key)]
        if entry.get("ranking"):
            reasons.insert(0, f"ranking: {REFUSED['ranking']}")
    if reasons:
        raise UserError(f"{file}: {name}: {reasons[0]}")


def read_sources(names: Sequence[str], file: Path, stage: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Entries of `data.source` for these data sets, and columns that no entry names but our formats would read.

    `stage` is sft or pt.

    Raises:
        UserError: an entry is missing, or says what cannot be done here.
    """
    try:
        entries = read_object(file)
        found = [_source(entries[name], f"{file}: {name}", file.parent, stage) for name in names]
    except NotAnObject as error:
        raise UserError(f"{file}: {error}; correct it") from None
    except (ValueError, TypeError, AttributeError):
        raise UserError(f"{file}: must describe data sets as LLaMA-Factory does; correct it") from None
    except KeyError as error:
        raise UserError(f"{file}: has no data set {error}, which the configuration names; add it") from None
    read = {column for _, columns in found for column in columns}
    return [source for source, _ in found], [column for column in OPTIONAL_COLUMNS if column not in read]


def _source(
    entry: Mapping[str, Any], where: str, directory: Path, stage: str
) -> tuple[dict[str, Any], Collection[str]]:
    """An entry of `data.source`, and the columns that it reads."""
    columns, formatting = entry.get("columns") or {}, entry.get("formatting") or "alpaca"
    refused = [f"{key}: {reason}" for key, reason in REFUSED.items() if entry.get(key)]
    refused += [f"columns.{key}: {reason}" for key, reason in REFUSED_COLUMNS.items() if columns.get(key)]
    refused += [
        f"tags.{tag}: must be {' or '.join(TAGS[tag])}; got {value}"
        for tag, value in (entry.get("tags") or {}).items()
        if value not in TAGS.get(tag, ())
    ]
    if formatting not in OUR_KEYS:
        refused.append(f"formatting: must be {', '.join(OUR_KEYS)}; got {formatting}")
    if "hf_hub_url" in entry:
        source = f"hf://{entry['hf_hub_url']}"
    elif "file_name" in entry:
        source = str(directory / entry["file_name"])
        if not Path(source).exists():
            refused.append(f"file_name: {source} does not exist")
    else:
        refused.append("must have hf_hub_url or file_name; other places are not read here")
    if refused:
        raise UserError(f"{where}: {refused[0]}")
    row_format, read = _columns(columns, formatting, stage, where)
    found = {
        "source": source,
        "config": entry.get("subset"),
        "split": entry.get("split"),
        "format": row_format,
        "columns": {key: column for key, column in read.items() if key != column},
        "rows": entry.get("num_samples"),
    }
    return {key: value for key, value in found.items() if value}, read.values()


def _columns(columns: Mapping[str, str], formatting: str, stage: str, where: str) -> tuple[str, dict[str, str]]:
    """Our format, and the column of each of its keys."""
    if stage == "pt" or (formatting == "alpaca" and columns and "response" not in columns):
        if formatting != "alpaca" or "response" in columns or not columns:
            raise UserError(f"{where}: stage pt trains the column of columns.prompt alone; name only that one")
        return "text", {"text": columns["prompt"]}
    keys = {**OUR_KEYS[formatting], **SHARED_KEYS}
    named = {keys[name]: column for name, column in columns.items() if column}
    return FORMATS.get(formatting, formatting), named or DEFAULT_COLUMNS[formatting]
