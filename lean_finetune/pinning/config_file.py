"""Read config.json and other JSON files of a model within limits, and recognize files by content."""

import glob
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Literal

from lean_finetune.core.errors import UsageFault, UserError, shortened
from lean_finetune.core.regular_files import read_regular

MOST_BYTES = 1 << 24
MOST_INDEX_BYTES = 1 << 25
"""Of an index of weights; models of 1,000 B parameters have some 150,000 names in 14 MB."""


POINTER = "it is a pointer of Git LFS: `git lfs pull` fetches the file"
STARTS = {
    b"version https://git-lfs.github.com/spec/": POINTER,
    b"<!doctype html": "it is a web page",
    b"<html": "it is a web page",
    b"pk\x03\x04": "it is a zip file, as torch.save writes: a pickle, which can run code",
    b"\x80\x02": "it is a pickle, which can run code",
    b"\x80\x04": "it is a pickle, which can run code",
    b"\x1f\x8b": "it is a gzip file",
}
"""What a file is that begins so, letters in lower case: downloads go wrong, and strangers have files of other kinds."""


def reason_of(path: Path, error: object = "") -> str:
    """What a file is instead of what its name says; else the error."""
    try:
        start = read_regular(path, max(map(len, STARTS))).lstrip().lower()
    except OSError:
        return str(error)
    return next((what for begins, what in STARTS.items() if start.startswith(begins)), str(error))


def refuse_other_text(parameter: str, path: Path) -> None:
    """Refuse a file of text that is a pointer or a web page, which nothing else would notice. Raises UserError."""
    if what := reason_of(path):
        raise UserError(f"{parameter}: {path} cannot be used ({what}); download or save it again")


class NotAnObject(ValueError):
    """A file has no JSON object. The message completes a sentence that begins with the file's path."""


def read_object(path: Path, most_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """The JSON object in a file of at most `most_bytes` bytes.

    Raises:
        NotAnObject: it cannot be read, is too large, is not JSON, or has another value.
    """
    try:
        text = read_regular(path, most_bytes + 1)
        if len(text) > most_bytes:
            raise NotAnObject(f"has more than {most_bytes} bytes")
        value = json.loads(text)
    except OSError as error:
        raise NotAnObject(f"cannot be read ({error.strerror})") from None
    except RecursionError:
        raise NotAnObject("is not JSON (nested too deeply)") from None
    except NotAnObject:
        raise
    except ValueError as error:
        raise NotAnObject(f"is not JSON ({shortened(reason_of(path, error), 200)})") from None
    if not isinstance(value, dict):
        raise NotAnObject(f"must be a JSON object; got {type(value).__name__}")
    return value


# File formats of rows by file name, such as .jsonl and .parquet.zst.

FileFormat = Literal["json", "csv", "tsv", "parquet", "arrow", "txt"]
Compression = Literal["gzip", "zstd"]

FORMATS: dict[str, FileFormat] = {
    # The content decides between JSON Lines and a JSON array: data sets use each name for both.
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "txt",
}
COMPRESSIONS: dict[str, Compression] = {".gz": "gzip", ".zst": "zstd"}
KNOWN_NAMES = f"{', '.join(FORMATS)}, each also {' or '.join(COMPRESSIONS)}"
# Files of published data sets that never contain rows.
_DOCUMENTATION_SUFFIXES = frozenset(
    ".md .rst .py .ipynb .sh .yaml .yml .toml .cfg .log .html .pdf .png .jpg .svg .md5 .sha256 .dvc .lock".split()
)
_DOCUMENTATION_NAMES = frozenset(
    "authors changelog citation contributing copying dataset_infos license licence makefile md5sums notice readme "
    "sha256sums _success".split()
)


@dataclass(frozen=True, kw_only=True)
class FileKind:
    """Format and compression of a file."""

    format: FileFormat
    compression: Compression | None

    @property
    def is_seekable(self) -> bool:
        """Whether reading its rows needs seeking."""
        return self.format in ("parquet", "arrow")


def file_kind(name: str) -> FileKind | None:
    """The format and compression that a file name says; None where it is unknown."""
    path = PurePath(name.lower())
    compression = COMPRESSIONS.get(path.suffix)
    format_suffix = path.with_suffix("").suffix if compression else path.suffix
    known = FORMATS.get(format_suffix)
    return FileKind(format=known, compression=compression) if known else None


def is_documentation(name: str) -> bool:
    """Whether a file documents a data set: README, LICENSE, checksums, code and the like."""
    path = PurePath(name.lower())
    return path.suffix in _DOCUMENTATION_SUFFIXES or path.name.split(".")[0] in _DOCUMENTATION_NAMES


def is_hidden(path: PurePath) -> bool:
    """Whether a part of a relative path is hidden."""
    return any(part.startswith(".") for part in path.parts)


def glob_base(source: str) -> str:
    """The directory of a glob: its parts before the first one with a wildcard."""
    parts = Path(source).parts
    plain = next(k for k, part in enumerate(parts) if glob.has_magic(part))
    return str(Path(*parts[:plain]))


# Read a model's config.json and bound what it asks for, before transformers builds anything from it.

CONFIG_FILE, ADAPTER_CONFIG = "config.json", "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_FILES = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
IS_ADAPTER = "is an adapter without a model"
NAME_BASE = "name its base model, or merge the two first: peft's merge_and_unload, then save_pretrained"
MOST_VALUES = 100_000
MOST_LEVELS = 30
MOST_ITEMS = 10_000
"""Entries of a list; the longest of published models name layers that are not quantised."""
MOST_LAYERS = 512
"""The deepest published model has 126. A prediction builds each layer: 500 take half a minute."""
MOST_PARTS = 2**16
"""Labels, experts, heads: transformers makes an object for each."""
LARGEST = 2**40
LAYERS = re.compile(r"(layers?|blocks|stages|^depths?)$")
PARTS = re.compile(r"(labels|experts?|heads?|groups?)$|^(n|num)_\w+$")
OF_TENSORS = re.compile(r"position|ctx|tokens?|embe?d|vocab|size|patches|param")
"""Counts that are sizes of tensors, which may be larger."""
TEXTS = ("dtype", "torch_dtype", "model_type")
SECTIONS = re.compile(r"^(quantization_config|rope_scaling|\w+_config)$")


def read_config_json(directory: Path) -> dict[str, Any]:
    """The content of a model's config.json.

    Raises:
        UserError: it is no JSON object, or has a number, a list or a nesting that no model has.
    """
    path = directory / CONFIG_FILE
    config = json_object(path)
    for number, (keys, value) in enumerate(_values(config)):
        fault = "it has too many values" if number > MOST_VALUES else _fault(keys, value)
        if fault is not None:
            raise UserError(f"model.name: {path}: {fault}; give the config.json that belongs to the model")
    return config


def refuse_adapter(directory: Path, name: str) -> None:
    """Refuse a directory with an adapter and no model.

    Raises:
        UserError: it has adapter_config.json and no config.json.
    """
    path = directory / ADAPTER_CONFIG
    if path.is_file() and not (directory / CONFIG_FILE).exists():
        base = json_object(path).get("base_model_name_or_path")
        of = f" ({shortened(str(base))})" if base else ""
        raise UserError(f"model.name: {name} {IS_ADAPTER}; {NAME_BASE.replace(' base model', f' base model{of}')}")


def refuse_no_model(directory: Path) -> None:
    """Refuse a directory that has no tuned model, before anything slow is imported.

    Raises:
        UsageFault: it is missing, or has neither an adapter nor a model.
    """
    if not any((directory / name).is_file() for name in (ADAPTER_CONFIG, CONFIG_FILE)):
        is_missing = "" if directory.exists() else ", which does not exist"
        raise UsageFault(
            f"--model: must be a directory with {ADAPTER_CONFIG} or {CONFIG_FILE}; got {str(directory)!r}{is_missing}; "
            "name the directory of a tuned model, or make one with `dvc repro`"
        )


def json_object(path: Path, most_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """The JSON object in a file of a model. Raises UserError if it has none, or more bytes."""
    try:
        return read_object(path, most_bytes)
    except NotAnObject as error:
        raise UserError(f"model.name: {path} {error}; download or save it again") from None


def _values(config: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each value with the keys that lead to it; entries of a list have its keys."""
    waiting: list[tuple[tuple[str, ...], Any]] = [((), config)]
    while waiting:
        keys, value = waiting.pop()
        if keys:
            yield keys, value
        if isinstance(value, dict):
            waiting += [((*keys, str(key)), below) for key, below in value.items()]
        elif isinstance(value, list) and len(value) <= MOST_ITEMS:
            waiting += [(keys + ("",) * isinstance(below, dict | list), below) for below in value]


def _fault(keys: tuple[str, ...], value: Any) -> str | None:
    """What is wrong with a value."""
    name = next(key for key in reversed((" ", *keys)) if key)
    shown = shortened(".".join(key for key in keys if key))
    if len(keys) > MOST_LEVELS:
        return f"{shown} is nested more than {MOST_LEVELS} levels deep"
    if isinstance(value, list) and len(value) > MOST_ITEMS:
        return f"{shown} must have at most {MOST_ITEMS} entries; got {len(value)}"
    if name in TEXTS and not isinstance(value, str | None):
        return f"{shown} must be a text; got {shortened(json.dumps(value))}"
    if SECTIONS.match(name) and not isinstance(value, dict | None):
        return f"{shown} must be an object; got {shortened(json.dumps(value))}"
    if isinstance(value, int) and abs(value) > _largest(name):
        return f"{shown} must be at most {_largest(name)}; got {shortened(str(value))}"
    return None


def _largest(name: str) -> int:
    """The largest number of a key."""
    if LAYERS.search(name):
        return MOST_LAYERS
    return MOST_PARTS if PARTS.search(name) and not OF_TENSORS.search(name) else LARGEST
