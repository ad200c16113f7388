"""The table of stage reference belongs to its tokens and weights alone."""

from pathlib import Path

import numpy as np
import pytest

from lean_finetune.core.errors import UserError
from lean_finetune.step.reference_table import identity, read_table, write_table

LOCK = {"files": {"model.safetensors": "0"}}


def test_a_table_of_other_tokens_or_weights_is_refused(tmp_path: Path):
    """Tokens of equal lengths: only the shards differ, as after a change of data.template_date."""
    shard = tmp_path / "tokens/train/00000.arrow"
    shard.parent.mkdir(parents=True)
    shard.write_bytes(b"first")
    tokens, table = tmp_path / "tokens", tmp_path / "train.arrow"
    of = identity(tokens, LOCK)
    write_table(table, np.array([-1.5, -2.0], np.float32), of)
    assert read_table(table, of, 2).tolist() == [-1.5, -2.0]
    shard.write_bytes(b"other")
    for other, rows in ((identity(tokens, LOCK), 2), (identity(tokens, {"files": {}}), 2), (of, 3)):
        with pytest.raises(UserError, match="was computed from other weights or tokens than this run's"):
            read_table(table, other, rows)
