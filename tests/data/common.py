"""Helpers for tests of stage tokenize."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer

from lean_finetune.core.atomic_files import read_json
from lean_finetune.data.chat.control_tokens import TextSegment
from lean_finetune.data.encode.row_tokenizer import RowTokenizer
from lean_finetune.data.encode.tokenizer_engine import load_engine
from lean_finetune.data.encode.whole_row_encoder import EncodedRows
from lean_finetune.data.format.format_base import Conversation, SourceFormat
from lean_finetune.data.format.row_formats import parse_row

DATE = "2024-07-26"
"""data.template_date."""
CALL: dict[str, Any] = {"name": "add", "arguments": {"a": 1, "b": [2, "三"]}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One plus two, then say hi."},
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "3. 你好!"},
]
USER, ANSWER = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}


def chat_row(prompt: str = "Hi", answer: str = "Hello") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]}


def shape_of(name: str, **columns: str) -> SourceFormat:
    return SourceFormat(format=name, columns=columns)


def conversation(row: dict[str, Any], shape: str) -> Conversation:
    example = parse_row(row, shape_of(shape))
    assert isinstance(example, Conversation)
    return example


def read_tokens(path: Path) -> list[dict[str, Any]]:
    """Records of an Arrow file, or of all shards of a directory."""
    if path.is_dir():
        return [row for shard in sorted(path.iterdir()) for row in read_tokens(shard)]
    with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
        return reader.read_all().to_pylist()


def spans_of(row: dict[str, Any]) -> list[tuple[int, int]]:
    flat = row["loss_spans"]
    return list(zip(flat[::2], flat[1::2], strict=True))


def row_tokenizer(directory: Path, engine: str = "tokenizers") -> RowTokenizer:
    return RowTokenizer(directory, load_engine(engine, directory))


class EncodedRow(NamedTuple):
    """The ids and trained spans of one row."""

    ids: np.ndarray
    spans: np.ndarray


def encode_one(tokenizer: RowTokenizer, segments: list[TextSegment]) -> EncodedRow:
    return row_of(tokenizer.encode_rows([segments]), 0)


def row_of(encoded: EncodedRows, number: int) -> EncodedRow:
    ids = encoded.ids[encoded.offsets[number] : encoded.offsets[number + 1]]
    return EncodedRow(ids=ids, spans=encoded.spans[encoded.span_rows == number])


def decoder(directory: Path):
    """Ids back to text, control tokens included."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False)


def contents(*places: Path) -> dict[str, bytes]:
    """Every file below directories, and single files, by path."""
    files = [file for place in places for file in ([place] if place.is_file() else place.rglob("*"))]
    return {str(file): file.read_bytes() for file in sorted(files) if file.is_file()}


def meta(directory: Path) -> dict[str, Any]:
    return read_json(directory / "meta.json")


def messages(*given, **columns):
    return {"messages": list(given), **columns}


def turns(*pairs):
    return {"conversations": [{"from": role, "value": value} for role, value in pairs]}


def call(**function):
    return {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}
