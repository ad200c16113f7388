"""TRL's own packing: its pack_dataset with strategy bfd and the batches of rows it takes by default.

Run as `python trl_bfd.py LENGTHS CAPACITY OUT` in a virtual environment with TRL: OUT gets rows and
bounds of its bins.
"""

import sys

import numpy as np
import pyarrow as pa
from datasets import Dataset
from trl import pack_dataset


def main() -> None:
    """Pack rows whose every token is the number of the row, so that bins tell which rows they hold."""
    lengths_path, capacity, out = sys.argv[1:]
    lengths = np.load(lengths_path)
    tokens = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int32)])
    data = Dataset(pa.table({"input_ids": pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(tokens))}))
    packed = pack_dataset(data, seq_length=int(capacity), strategy="bfd").data
    rows, sizes = [], []
    for ids, of_bin in zip(packed.column("input_ids").to_numpy(), packed.column("seq_lengths").to_numpy(), strict=True):
        rows.append(ids[np.cumsum(of_bin) - 1])
        sizes.append(len(of_bin))
    np.savez(out, rows=np.concatenate(rows), bounds=np.concatenate([[0], np.cumsum(sizes)]))


if __name__ == "__main__":
    main()
