"""The table of stage reference belongs to its tokens and weights alone."""

from pathlib import Path

import numpy as np
import pytest

from lean_finetune.core.errors import UserError
from lean_finetune.step.reference_table import identity, read_table, write_table
from tests.small_model import spec_of

FULL = spec_of(method="full")
LOCK = {"files": {"model.safetensors": "0"}}


def test_a_table_of_other_tokens_or_weights_is_refused(tmp_path: Path):
    """Tokens of equal lengths: only the shards differ, as after a change of data.template_date."""
    shard = tmp_path / "tokens/train/00000.arrow"
    shard.parent.mkdir(parents=True)
    shard.write_bytes(b"first")
    tokens, table = tmp_path / "tokens", tmp_path / "train.arrow"
    of = identity(tokens, LOCK, FULL)
    write_table(table, np.array([-1.5, -2.0], np.float32), of)
    assert read_table(table, of, 2).tolist() == [-1.5, -2.0]
    changes = {"method": "qlora"}, {"precision": "bf16"}, {"quant": FULL.quant.model_copy(update={"type": "fp4"})}
    others = [identity(tokens, LOCK, FULL.model_copy(update=change)) for change in changes]
    shard.write_bytes(b"other")
    others += [identity(tokens, LOCK, FULL), identity(tokens, {"files": {}}, FULL)]
    for other, rows in (*((other, 2) for other in others), (of, 3)):
        with pytest.raises(UserError, match="was computed from other weights or tokens than this run's"):
            read_table(table, other, rows)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_damaged_table_is_refused_before_training(tmp_path: Path, value: float):
    """Training would stop at the first step, and blame the learning rate."""
    write_table(tmp_path / "train.arrow", np.array([-1.0, value], np.float32), "same")
    with pytest.raises(UserError, match="log-probabilities must be finite"):
        read_table(tmp_path / "train.arrow", "same", 2)
