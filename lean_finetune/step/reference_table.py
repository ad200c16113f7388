"""The table of stage reference: log-probabilities of all rows under the model before training."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from lean_finetune.config.schema import BaseWeights
from lean_finetune.core.arrow_files import ArrowWriter, open_batches, read_column
from lean_finetune.core.atomic_files import sha256_file, sha256_json
from lean_finetune.core.errors import UserError
from lean_finetune.pinning.locate import locked_files
from lean_finetune.step.token_rows import Split

SCHEMA = pa.schema([pa.field("logp", pa.float32(), nullable=False)])
SPLITS: tuple[Split, ...] = ("train", "heldout")


def identity(tokens: Path, model_lock: Mapping[str, Any], train: BaseWeights) -> str:
    """Equal for equal tokens, and equal weights in equal types."""
    files = {path.relative_to(tokens).as_posix(): sha256_file(path) for path in sorted(tokens.rglob("*.arrow"))}
    # One attribute after the other: a stage may read only the parameters that it declares.
    types = [train.method, train.precision, train.quant.type, train.quant.double]
    return sha256_json({"tokens": files, "model": locked_files(model_lock), "types": types})


def write_table(path: Path, logps: np.ndarray, of: str) -> None:
    """Write the sums of log-probabilities of a split's rows, float32; the caller makes the file atomic."""
    schema = SCHEMA.with_metadata({"identity": of})
    with ArrowWriter(path, schema) as writer:
        writer.write(pa.record_batch([pa.array(logps, pa.float32())], schema=schema))


def read_table(path: Path, of: str, rows: int, *, finished: bool = True) -> np.ndarray:
    """Read the table of a split with so many rows; one that is not `finished` has NaN for rows without a value.

    Raises UserError if it is missing or damaged, or was computed from other weights or tokens than those of `of`.
    """
    batches = open_batches(path, {"logp": (pa.float32(),)})
    metadata = batches[0].schema.metadata or {} if batches else {}
    logps = read_column(batches, "logp", np.float32)
    if metadata.get(b"identity", b"").decode(errors="replace") != of or len(logps) != rows:
        raise UserError(f"{path}: was computed from other weights or tokens than this run's; run `dvc repro reference`")
    if finished and not np.isfinite(logps).all():
        raise UserError(f"{path}: log-probabilities must be finite; the file is damaged; run `dvc repro -f reference`")
    return logps
