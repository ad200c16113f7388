"""What rows carry from their source to the files of tokens is one class: shards, index and duplicates follow."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from lean_finetune.core.errors import RowFault
from lean_finetune.data.shards.shard_files import merge, write_shard
from lean_finetune.data.shards.tokenize_block import BlockTokenizer, TokenSettings
from lean_finetune.data.shards.tokenize_job import token_inputs
from lean_finetune.rows.columns import InspectedRows, RowColumns
from tests.data.common import chat_row, read_tokens
from tests.data.shards.test_tokenize_block import SETTINGS, block_of


@dataclass(frozen=True, kw_only=True)
class ScoreColumns(RowColumns):
    """A number of each row in the shards, and its square in the index."""

    fields = (pa.field("score", pa.int32(), nullable=False),)
    index_fields = (pa.field("square", pa.int32(), nullable=False),)
    cut_count, cut_apart = "cut_scores", "its score is above the limit"

    most: int = 100

    @classmethod
    def of(cls, rows: InspectedRows) -> "ScoreColumns":
        return cls()

    @property
    def metadata(self) -> dict[str, str]:
        return {"most": str(self.most)}

    def value(self, row: Mapping[str, Any], example: Any, source: Any, file: int) -> int:
        if row["score"] < 0:
            raise RowFault("a score is at least 0")
        return int(row["score"])

    def counts(self, value: int) -> Mapping[str, int]:
        return {"high_scores": int(value > 50)}

    def cut(self, chunks: Any, encoded: Any, values: Sequence[int]) -> np.ndarray:
        return np.array([values[row] > self.most for row in chunks.rows.tolist()], bool)

    def arrays(self, values: Sequence[int]) -> list[pa.Array]:
        return [pa.array(values, pa.int32())]

    def index_arrays(self, values: Sequence[int]) -> list[pa.Array]:
        return [pa.array([value**2 for value in values], pa.int32())]

    def digest(self, value: int) -> bytes:
        return bytes([value])


SCORES = [3, 3, 7, -1, 60, 101]


@pytest.fixture
def settings(tiny_dir) -> TokenSettings:
    given = {**SETTINGS, "heldout_fraction": 0.0, "drop_duplicates": True, "attached": (ScoreColumns(),)}
    return TokenSettings(tokenizer_directory=tiny_dir, **given)


def test_the_columns_of_one_class_reach_shards_index_and_duplicates(settings, tmp_path):
    """A second attachment that enters every function from source to shard."""
    block = block_of([json.dumps({**chat_row("One?", "Two."), "score": score}) for score in SCORES])
    tokens = BlockTokenizer(settings)(block)
    shard = write_shard(tmp_path, 0, "key", [(block, tokens)])
    (tmp_path / "out").mkdir()
    totals = merge(tmp_path, [shard], tmp_path / "out", 1, 512, True, attached=settings.attached)
    rows, index = (read_tokens(tmp_path / "out" / name) for name in ("train", "train-index.arrow"))
    assert [one["score"] for one in rows] == [3, 3, 7, 60]
    assert [(one["square"], one["dropped"]) for one in index] == [(9, False), (9, True), (49, False), (3600, False)]
    assert totals.carried == [{"train": 0, "heldout": 0}]
    with pa.ipc.open_file(tmp_path / "out/train-index.arrow") as reader:
        assert reader.schema.metadata == {b"most": b"100"}
    assert [one.reason for one in tokens.tally.rejects] == ["a score is at least 0", "its score is above the limit"]
    counts = tokens.tally.counts[0]
    assert (counts["bad_rows"], counts["cut_scores"], counts["high_scores"]) == (1, 1, 2)


def test_unfinished_work_with_other_settings_of_it_is_not_taken_up(settings):
    found = {
        token_inputs({}, {"files": {}}, TokenSettings(**{**vars(settings), "attached": attached}), None)["parameters"]
        for attached in ((), (ScoreColumns(),), (ScoreColumns(most=9),))
    }
    assert len(found) == 3
