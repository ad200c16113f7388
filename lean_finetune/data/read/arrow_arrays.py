"""Conversion between numpy and Arrow without pandas.

`pa.array` and `to_numpy` import pandas wherever it is installed, which costs 40 MB in each process. So does
`to_pandas_dtype` in older releases of pyarrow.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import pyarrow as pa


def from_numpy(values: np.ndarray, kind: pa.DataType) -> pa.Array:
    """Numbers or booleans as an Arrow array of a type of the same width. Numbers are not copied."""
    if pa.types.is_boolean(kind):
        packed = np.packbits(values, bitorder="little")
    else:
        packed = np.ascontiguousarray(values, to_numpy(pa.nulls(0, kind)).dtype)
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(packed)])


def from_texts(texts: Sequence[str | None]) -> pa.Array:
    """Texts as an Arrow array of strings. None is null. Raises UnicodeEncodeError if a text has a lone surrogate."""
    if all(text is None for text in texts):
        return pa.nulls(len(texts), pa.string())
    encoded = [b"" if text is None else text.encode() for text in texts]
    offsets = np.fromiter(accumulate(map(len, encoded), initial=0), np.int32, len(texts) + 1)
    validity = np.packbits([text is not None for text in texts], bitorder="little") if None in texts else None
    buffers = [
        None if validity is None else pa.py_buffer(validity),
        pa.py_buffer(offsets),
        pa.py_buffer(b"".join(encoded)),
    ]
    return pa.Array.from_buffers(pa.string(), len(texts), buffers)


def to_numpy(numbers: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """Numbers without nulls as a numpy array: a view of an array, a copy of a chunked array."""
    contiguous = numbers.combine_chunks() if isinstance(numbers, pa.ChunkedArray) else numbers
    return np.from_dlpack(contiguous)
