"""Arrow arrays made of numpy's memory: the same as pyarrow's own, without pandas."""

import sys

import numpy as np
import pyarrow as pa
import pytest

from lean_finetune.data.read.arrow_batches import from_numpy, from_texts, to_numpy
from tests.conftest import ROOT
from tests.processes import run_bounded

WORKER = """
import sys
import numpy as np
import lean_finetune.data.shards.tokenize_block
from lean_finetune.data.read.source_blocks import RowBlock
from lean_finetune.data.read.decode_rows import decode
from lean_finetune.data.shards.shard_files import digests, record_batch, token_schema
from lean_finetune.data.encode.row_tokenizer import limit_lengths
from lean_finetune.data.encode.row_tokenizer import EncodedRows
row = EncodedRows(ids=np.arange(4, dtype=np.int32), offsets=np.array([0, 4]), span_rows=np.array([0]),
                  spans=np.array([[1, 4]]), failed=frozenset())
digests(record_batch(token_schema(9, 9, 1), limit_lengths(row, 9, "drop"), row.ids, ["a"], 0, np.zeros(1, np.uint32)))
list(decode(RowBlock(number=0, source=0, file=0, kind="lines", payload=b'{"text": "a"}', first_row=0)))
print({"torch", "transformers", "tiktoken", "pandas", "pyarrow.parquet"} & set(sys.modules))
"""


@pytest.mark.parametrize("length", [0, 1, 9])
@pytest.mark.parametrize("kind", [pa.uint16(), pa.int32(), pa.uint32(), pa.uint64(), pa.bool_()], ids=str)
def test_numbers_and_truth_values_are_those_that_pyarrow_makes(kind, length):
    values = np.arange(length) % 3
    made = from_numpy(values, kind)
    made.validate(full=True)
    assert made.equals(pa.array(values.astype(kind.to_pandas_dtype()), kind))


@pytest.mark.parametrize(
    "texts", [[], [None], [None, None], ["a", "", "你好"], ["a", None, "", None, "é"] * 3], ids=str
)
def test_texts_are_those_that_pyarrow_makes(texts):
    made = from_texts(texts)
    made.validate(full=True)
    assert made.equals(pa.array(texts, pa.string())) and made.null_count == texts.count(None)


def test_numbers_come_back_from_a_slice_and_from_chunks():
    values = pa.array([5, 6, 7, 8], pa.uint16())
    assert to_numpy(values[1:3]).tolist() == [6, 7]
    assert to_numpy(pa.chunked_array([values, values[:0], values[3:]])).tolist() == [5, 6, 7, 8, 8]
    assert len(to_numpy(pa.chunked_array([], pa.int32()))) == 0


def test_a_worker_imports_nothing_heavy():
    """Each worker process pays for what it imports; transformers alone takes seconds and hundreds of MB."""
    done = run_bounded([sys.executable, "-c", WORKER], cwd=ROOT, check=True)
    assert done.stdout.strip() == "set()"
