"""LLaMA-Factory's own packing: its greedy_knapsack on the batches of rows it takes by default.

Run as `python llama_factory_knapsack.py LENGTHS CAPACITY OUT` in a virtual environment with LLaMA-Factory: OUT gets
rows and bounds of its bins.
"""

import sys
from collections import defaultdict

import numpy as np
from llamafactory.data.processor.processor_utils import greedy_knapsack

BATCH_ROWS = 1000
"""Its preprocessing_batch_size."""


def main() -> None:
    """Pack lengths, then name a row for each."""
    lengths_path, capacity, out = sys.argv[1:]
    lengths = np.load(lengths_path)
    rows, sizes = [], []
    for first in range(0, len(lengths), BATCH_ROWS):
        batch = lengths[first : first + BATCH_ROWS].tolist()
        rows_of = defaultdict(list)
        for place, length in enumerate(batch):
            rows_of[length].append(first + place)
        for knapsack in greedy_knapsack(batch, int(capacity)):
            rows += [rows_of[length].pop() for length in knapsack]
            sizes.append(len(knapsack))
    np.savez(out, rows=np.array(rows), bounds=np.concatenate([[0], np.cumsum(sizes)]))


if __name__ == "__main__":
    main()
