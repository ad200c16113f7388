"""Which files hold rows, told by their names: .jsonl, .parquet.zst and so on."""

import glob
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Literal

FileFormat = Literal["json", "csv", "tsv", "parquet", "arrow", "txt"]
Compression = Literal["gzip", "zstd"]

FORMATS: dict[str, FileFormat] = {
    # JSON Lines and JSON arrays are told apart by their first byte, as either is found under each name.
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
# What lies beside rows in published data sets and never holds any.
_BESIDE_SUFFIXES = frozenset(
    ".md .rst .py .ipynb .sh .yaml .yml .toml .cfg .log .html .pdf .png .jpg .svg .md5 .sha256 .dvc .lock".split()
)
_BESIDE_NAMES = frozenset(
    "authors changelog citation contributing copying dataset_infos license licence makefile md5sums notice readme "
    "sha256sums _success".split()
)


@dataclass(frozen=True, kw_only=True)
class FileKind:
    """How the bytes of a file become rows."""

    format: FileFormat
    compression: Compression | None

    @property
    def is_seekable(self) -> bool:
        """Whether its rows can be found only by moving about in the file."""
        return self.format in ("parquet", "arrow")


def file_kind(name: str) -> FileKind | None:
    """What a file's name says of its content; None where it says nothing known."""
    path = PurePath(name.lower())
    compression = COMPRESSIONS.get(path.suffix)
    format_suffix = path.with_suffix("").suffix if compression else path.suffix
    known = FORMATS.get(format_suffix)
    return FileKind(format=known, compression=compression) if known else None


def is_documentation(name: str) -> bool:
    """Whether a file documents a data set: README, LICENSE, checksums, pictures, code."""
    path = PurePath(name.lower())
    return path.suffix in _BESIDE_SUFFIXES or path.name.split(".")[0] in _BESIDE_NAMES


def is_hidden(path: PurePath) -> bool:
    """Whether a part of a relative path is hidden."""
    return any(part.startswith(".") for part in path.parts)


def glob_base(source: str) -> str:
    """The directory below which a glob's matches lie: all before its first part with a wildcard."""
    parts = Path(source).parts
    plain = next(k for k, part in enumerate(parts) if glob.has_magic(part))
    return str(Path(*parts[:plain]))
