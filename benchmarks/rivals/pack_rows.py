"""How other tools pack rows: `python pack_rows.py TOOL LENGTHS CAPACITY OUT` writes the rows and bounds of their bins.

Run it in the tool's virtual environment.
"""

import sys
from collections import defaultdict

import numpy as np

BATCH_ROWS = 1000
"""LLaMA-Factory's default preprocessing_batch_size."""


def trl(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """TRL's pack_dataset with strategy bfd. Every token is the number of its row, so that bins show their rows."""
    import pyarrow as pa
    from datasets import Dataset
    from trl import pack_dataset

    tokens = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int32)])
    data = Dataset(pa.table({"input_ids": pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(tokens))}))
    packed = pack_dataset(data, seq_length=capacity, strategy="bfd").data
    columns = (packed.column(name).to_numpy() for name in ("input_ids", "seq_lengths"))
    return [ids[np.cumsum(of_bin) - 1].tolist() for ids, of_bin in zip(*columns, strict=True)]


def llama_factory(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """LLaMA-Factory's greedy_knapsack on batches of rows."""
    from llamafactory.data.processor.processor_utils import greedy_knapsack

    bins = []
    for first in range(0, len(lengths), BATCH_ROWS):
        batch = lengths[first : first + BATCH_ROWS].tolist()
        rows_of = defaultdict(list)
        for place, length in enumerate(batch):
            rows_of[length].append(first + place)
        bins += [[rows_of[length].pop() for length in knapsack] for knapsack in greedy_knapsack(batch, capacity)]
    return bins


if __name__ == "__main__":
    tool, lengths_path, tokens, out = sys.argv[1:]
    packed_rows = globals()[tool](np.load(lengths_path), int(tokens))
    sizes = [len(rows) for rows in packed_rows]
    np.savez(out, rows=np.concatenate(packed_rows), bounds=np.concatenate([[0], np.cumsum(sizes)]))
