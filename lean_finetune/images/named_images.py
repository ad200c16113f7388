"""The images that the rows of a source name by path, for pinning: found without the rows' format."""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePath
from typing import Any

from lean_finetune.config.data_schema import Data
from lean_finetune.core.errors import RowFault, UserError
from lean_finetune.data.format.given_images import IMAGE_COLUMNS, IMAGE_PARTS, GivenImage
from lean_finetune.data.format.image_tags import PATH_TAG
from lean_finetune.data.format.row_images import column_images, given_image
from lean_finetune.data.format.row_values import list_or_nothing
from lean_finetune.data.format.unread_columns import without
from lean_finetune.data.read.decode_rows import decode
from lean_finetune.data.read.source_blocks import open_local, read_blocks
from lean_finetune.images.image_store import image_path
from lean_finetune.pinning.data_source import NamedFiles
from lean_finetune.pinning.image_pins import pin_images
from lean_finetune.pinning.locate import DataFile, data_files, rows_directory
from lean_finetune.pinning.read_locks import DATA_SCHEMA

# The name of each column and kind of part has the first, a tag around a path the second; JSON may write their letters
# as the third.
_SIGNS = (b"image", b"img", b"\\u006")
_SEARCHED_BYTES = 1 << 20
_SIGN_BYTES = max(map(len, _SIGNS))


def named_images(
    source: Mapping[str, Any], columns: Mapping[str, Any] | None, ignore_columns: Collection[str] | None
) -> dict[str, Path]:
    """The images that the rows of a local source of locks/data.json name by path, by name.

    The name is the path as the row writes it; in front of a relative one stands the path of the row's directory within
    the source. `columns` and `ignore_columns` are data.columns and data.ignore_columns. What is at fault in a file, a
    row or a path is left out: stage tokenize refuses it.
    """
    lock = {"schema": DATA_SCHEMA, "sources": [source]}
    given = source["columns"] if source["columns"] is not None else columns or {}
    column = given.get(IMAGE_COLUMNS[0])
    files = data_files(lock)
    if column is None and not any(map(_may_name_images, files)):
        return {}
    directories = [rows_directory(file) for file in files]
    within = [PurePath(file["path"]).parent for file in source["files"]]
    found: dict[str, Path] = {}
    for file, row in _rows(lock, column is None):
        row = without(row, ignore_columns or ())
        if column is not None:
            row = {**row, IMAGE_COLUMNS[0]: row.get(column)}
        for image in _images(row):
            if image.path is not None and image.data is None:
                with suppress(RowFault):
                    found[os.path.join(within[file], image.path)] = image_path(image, directories[file])
    return found


def named_files(data: Data) -> NamedFiles:
    """The images that rows name, as section data says how rows are read."""
    find = partial(named_images, columns=data.columns, ignore_columns=data.ignore_columns)
    return NamedFiles(key="images", word="image", find=find, pin=pin_images)


def refuse_changed_images(
    lock: Mapping[str, Any], columns: Sequence[Mapping[str, Any]], ignore_columns: Collection[str]
) -> None:
    """Refuse images whose content differs from locks/data.json; `columns` as of `named_images`, for each source.

    Raises:
        UserError: naming the source.
    """
    for source, own in zip(lock["sources"], columns, strict=True):
        pinned = source.get("images")
        if pinned is not None and pin_images(named_images(source, own, ignore_columns)) != pinned:
            raise UserError(
                f"data.source: images that rows of {source['source']} name changed since they were pinned; run "
                "`dvc repro` again when nothing changes them"
            )


def _may_name_images(file: DataFile) -> bool:
    """Whether the rows of a file may name images, by a search for _SIGNS, which is faster than reading rows."""
    if file.kind.format == "txt":
        return False
    if file.kind.is_seekable or file.kind.compression is not None or file.path is None:
        return True
    end = b""
    with open_local(file.path, file.name) as stream:
        while block := stream.read(_SEARCHED_BYTES):
            if any(sign in block or sign in end + block[:_SIGN_BYTES] for sign in _SIGNS):
                return True
            end = block[-_SIGN_BYTES:]
    return False


def _rows(lock: Mapping[str, Any], may_skip: bool) -> Iterator[tuple[int, dict[str, Any]]]:
    """(index of its file, row) for each row; `may_skip`: but those of blocks without any of _SIGNS."""
    with suppress(UserError):  # A damaged or changed file: tokenize reads it again.
        for block in read_blocks(lock, max_rows=None, progress=lambda _: None):
            if not may_skip or any(sign in block.payload for sign in _SIGNS):
                yield from ((block.file, row.value) for row in decode(block) if row.value is not None)


def _images(row: Mapping[str, Any]) -> Iterator[GivenImage]:
    """The images of a row's columns, content parts and tags around paths."""
    with suppress(RowFault):
        yield from column_images(row)
    for value in _parts_and_texts(list(row.values())):
        paths = [tag[1].strip() for tag in PATH_TAG.finditer(value)] if isinstance(value, str) else [value]
        for path in paths:
            with suppress(RowFault):
                yield given_image(path, "")


def _parts_and_texts(value: Any) -> Iterator[dict[str, Any] | str]:
    """The content parts with images, and the texts, inside a value of a row, also in text of a list."""
    if isinstance(value, str):
        found = list_or_nothing(value) if value.lstrip().startswith("[") else []
        if not found:
            yield value
        value = found
    if isinstance(value, dict):
        if value.get("type") in IMAGE_PARTS:
            yield value
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _parts_and_texts(item)
