"""File formats of rows by file name, such as .jsonl and .parquet.zst."""

import glob
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Literal

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
    """Whether a file documents a data set: README, LICENSE, checksums, images, code."""
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
