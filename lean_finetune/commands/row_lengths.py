"""Tokens of the rows of `fit --lengths`: of a file of rows or of numbers, or a sample with given quantiles."""

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from cuda_memory.user_paths import user_path
from lean_finetune.config.data_schema import Data
from lean_finetune.config.schema import Params
from lean_finetune.core.errors import UserError
from lean_finetune.islands.attachments import attached_of
from lean_finetune.islands.pins import config_facts
from lean_finetune.pinning.config_file import json_object
from lean_finetune.pinning.locate import find_model
from lean_finetune.plan.optimizer_steps import RowIndex, source_weights

if TYPE_CHECKING:
    from lean_finetune.data.read.row_block import RowBlock

OPTION = "--lengths"
MOST_ROWS = 20_000
"""Rows that are read, from the start of a file: enough for the shapes of a plan, and tokenized in seconds."""
SAMPLE_ROWS = 4_000
"""Rows of a sample by quantiles."""
LONGEST_ROW = 1 << 20
"""Most tokens of a row, as the longest row that is searched."""
LEAST_TOKENS = 2
"""A row has a token to learn from and one to predict."""
FORMS = 'a file of rows, a file with a number or {"tokens": n} in each line, or p50=…,p99=…[,max=…]'
QUANTILE = re.compile(r"(p50|p99|max)=(\d+)")


def row_index(value: str, p: Params, *, truncates: bool) -> RowIndex:
    """The index of the rows that the value of the option means; `p` has the model and how rows are read.

    Where only lengths are known, all tokens of a row but the first are predicted, and all rows of tokens that a row
    becomes, such as both answers of a pair, have the same length. `truncates`: rows end at data.max_length.

    Raises:
        UserError: the value has another form, or the file has no lengths.
    """
    if is_of_quantiles(value):
        return index_of(np.repeat(of_quantiles(value), p.train.row_kind.token_rows))
    path = user_path(value, OPTION)
    if not path.exists():
        raise UserError(f"{OPTION}: must be {FORMS}; got {value!r}, which is no file")
    numbers = _numbers(path) if path.is_file() else None
    found = (
        _tokenized(path, p, truncates=truncates)
        if numbers is None
        else index_of(np.repeat(np.array(numbers, dtype=np.int32), p.train.row_kind.token_rows))
    )
    if not len(found.lengths):
        raise UserError(f"{OPTION}: {path} has no rows; name another file")
    return found


def is_of_quantiles(value: str) -> bool:
    """Whether the value of the option describes rows, whose number is not known, and names no file."""
    return "=" in value and not os.path.exists(value)


def index_of(lengths: np.ndarray, supervised: np.ndarray | None = None) -> RowIndex:
    """The index of rows of one source; `supervised` None means all tokens but the first."""
    return RowIndex(
        lengths=lengths,
        supervised=lengths - 1 if supervised is None else supervised,
        sources=np.zeros(len(lengths), np.uint16),
        dropped=np.zeros(len(lengths), bool),
        weights=(1.0,),
    )


def of_quantiles(value: str) -> np.ndarray:
    """Lengths whose logarithms are normally distributed, with a median, a 99th percentile and a longest row.

    Raises:
        UserError: the value has another form, or its figures contradict each other.
    """
    parts = [QUANTILE.fullmatch(part.strip()) for part in value.split(",")]
    found = {part[1]: int(part[2]) for part in parts if part is not None}
    if None in parts or len(found) < len(parts) or not {"p50", "p99"} <= found.keys():
        raise UserError(f"{OPTION}: must be {FORMS}; got {value!r}")
    median, high = found["p50"], found["p99"]
    longest = found.get("max", high)
    if not LEAST_TOKENS <= median <= high <= longest <= LONGEST_ROW:
        raise UserError(
            f"{OPTION}: needs {LEAST_TOKENS} <= p50 <= p99 <= max <= {LONGEST_ROW}; got p50={median}, p99={high}, "
            f"max={longest}"
        )
    normal = NormalDist()
    spread = math.log(high / median) / normal.inv_cdf(0.99)
    shares = (np.arange(SAMPLE_ROWS) + 0.5) / SAMPLE_ROWS
    lengths = np.array([median * math.exp(spread * normal.inv_cdf(share)) for share in shares])
    lengths = np.clip(lengths.round(), LEAST_TOKENS, longest).astype(np.int32)
    lengths[-1] = longest
    return lengths


def _numbers(path: Path) -> list[int] | None:
    """The lengths in a file with one in each line; None if its first line is something else.

    Raises:
        UserError: the file cannot be read, or a later line has another form.
    """
    lengths: list[int] = []
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                found = _length(line)
                if found is None and not lengths:
                    return None
                if found is None or not LEAST_TOKENS <= found <= LONGEST_ROW:
                    raise UserError(
                        f"{path}:{number}: must be a number of tokens from {LEAST_TOKENS} to {LONGEST_ROW}, or "
                        f'{{"tokens": n}}, as in the lines before; got {line.strip()[:40]!r}'
                    )
                lengths.append(found)
                if len(lengths) == MOST_ROWS:
                    break
    except UnicodeDecodeError:
        return None  # Of a kind that `data.read` knows, such as parquet, or refuses.
    except OSError as error:
        raise UserError(f"{OPTION}: {path} cannot be read ({error.strerror}); name a file that you may read") from None
    return lengths


def _length(line: str) -> int | None:
    """The number of tokens that a line states; None if it states none."""
    try:
        value = json.loads(line)
    except (json.JSONDecodeError, RecursionError):
        return None
    if isinstance(value, Mapping) and value.keys() == {"tokens"}:
        value = value["tokens"]
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _tokenized(path: Path, p: Params, *, truncates: bool) -> RowIndex:
    """The rows of a file or directory, as stage tokenize would make them.

    Raises:
        UserError: the model's tokenizer is not here, or a row cannot be used.
    """
    from lean_finetune.data.read.source_blocks import read_blocks  # Here: only rows need them.
    from lean_finetune.pinning.data_source import unwatched_lock

    directory = find_model(p.model.name, p.model.revision)
    if not (directory / "tokenizer.json").is_file():
        raise UserError(
            f"{OPTION}: {p.model.name} has no tokenizer.json here, which counts the tokens of {path}; name a local "
            "model with its tokenizer, or give lengths"
        )
    data = own_data(p.data, path, p.data.max_length if truncates else LONGEST_ROW)
    lock = unwatched_lock(OPTION, data)
    found = lengths_of(read_blocks(lock, max_rows=MOST_ROWS, progress=lambda _: None), lock, data, p, directory)
    for one in found.attached:
        if one.sizes_option and not one.is_empty:
            raise UserError(
                f"{OPTION}: {path} has {one.rows_text}, whose sizes count too; name the size by `fit "
                f"{one.sizes_option}`, or run `lean-finetune plan --data {path}`"
            )
    return replace(found, attached=())


def lengths_of(
    blocks: "Iterable[RowBlock]", lock: Mapping[str, Any], data: Data, p: Params, directory: Path
) -> RowIndex:
    """The rows of some blocks of a source, as stage tokenize would make them.

    Args:
        blocks: of the sources in `lock`.
        lock: what locks/data.json has for `data`.
        data: how rows are read.
        p: the engine of the tokenizer, run.tokenizer_engine.
        directory: of the model's tokenizer.

    Raises:
        UserError: a row cannot be used.
    """
    from lean_finetune.data.read.source_blocks import file_names
    from lean_finetune.data.shards.tokenize_job import prepare_job
    from lean_finetune.pinning.model_files import read_stop_ids
    from lean_finetune.rows.columns import index_schema

    config = json_object(directory / "config.json")
    engine, train = p.run.tokenizer_engine, p.train
    tokenizer_lock = {"files": {}, "stop_ids": read_stop_ids(directory, config), **config_facts(config)}
    job = prepare_job(data, engine, lock, tokenizer_lock, directory, kind=train.row_kind, scored=train.scores)
    names = file_names(lock)
    lengths, supervised, sources = [np.empty(0, np.int32)], [np.empty(0, np.int32)], [np.empty(0, np.uint16)]
    schema = index_schema(pa.schema([]), job.settings.attached)
    carried = [pa.record_batch([pa.array([], one.type) for one in schema], schema=schema)] if len(schema) else []
    for block in blocks:
        tokens = job.tokenizer(block)
        if data.on_bad_row == "fail" and (bad := tokens.tally.bad_row) is not None:
            raise UserError(f"{names[bad.file]}:{bad.line}: {bad.reason}")
        lengths.append(np.array([len(row) for row in tokens.train.rows.column("input_ids")], np.int32))
        supervised.append(tokens.train.supervised)
        sources.append(np.full(len(lengths[-1]), block.source, np.uint16))
        if tokens.train.carried:
            carried.append(pa.record_batch([values for _, values in tokens.train.carried], schema=schema))
    found = index_of(np.concatenate(lengths), np.concatenate(supervised))
    found = replace(found, sources=np.concatenate(sources), weights=source_weights(data.source))
    return replace(found, attached=attached_of(carried))


def own_data(data: Data, path: Path, max_length: int) -> Data:
    """The section for the rows of a file: all of them are trained."""
    own = {"source": str(path), "split": None, "config": None, "revision": None, "heldout_source": None}
    every = {"heldout_fraction": 0.0, "drop_duplicates": False, "max_rows": None}
    return data.model_copy(update={**own, **every, "max_length": max_length})
