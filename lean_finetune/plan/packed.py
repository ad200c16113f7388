"""Mode packed: join a step's rows without padding into as few micro-batches as possible, evenly filled.

All steps of a block are packed at once: arrays run over steps, Python loops over the rows of a step.
Legend: S steps, N rows of the longest step, B bins (micro-batches) of a step, H rows placed at once.
"""

import numpy as np

BINS_PER_ROUND = 4
"""Per round, the emptiest quarter of the bins gets a row each; below 8 bins, one bin per round."""
CLOSED = 1 << 40
"""Load of a closed bin: above any other, and small enough for a bin's number in the low bits."""


def pack_steps(lengths: np.ndarray, bounds: np.ndarray, cap_tokens: int, *, ranks: int, done: int) -> np.ndarray:
    """Put the rows of every step into bins: the least sufficient multiple of `ranks`, or one for every row.

    Rows go to the emptiest bins, longest first. This leaves bins that differ by few tokens, so that GPUs do not wait
    for each other. If a bin overflows, best fit is tried (the fullest bin with room, Johnson 1973), and then one more
    bin for every GPU.

    Returns the bin of each row within its step. `lengths` are tokens, int64, descending within each step and none above
    `cap_tokens`; `bounds` where each step begins in `lengths`, and the end. Each step has `done` micro-batches already,
    which count towards the multiple.
    """
    rows_S = np.diff(bounds)
    tokens_S = np.add.reduceat(lengths, bounds[:-1])
    least_S = -(-tokens_S // cap_tokens) + done
    bins_S = np.minimum(-(-least_S // ranks) * ranks - done, rows_S)
    step = np.repeat(np.arange(len(rows_S)), rows_S)
    place = np.arange(len(lengths)) - bounds[step]
    lengths_SN = np.zeros((len(rows_S), int(rows_S.max())), np.int64)
    lengths_SN[step, place] = lengths
    bin_SN = np.zeros(lengths_SN.shape, np.int32)
    pending = np.arange(len(rows_S))
    while len(pending):
        for fill in (_emptiest, _best_fit):
            filled_SN, fits = fill(lengths_SN[pending], rows_S[pending], bins_S[pending], cap_tokens)
            bin_SN[pending[fits]] = filled_SN[fits]
            pending = pending[~fits]
            if not len(pending):
                break
        bins_S[pending] = np.minimum(bins_S[pending] + ranks, rows_S[pending])
    return bin_SN[step, place]


def _open_bins(bins_S: np.ndarray) -> np.ndarray:
    """Loads of empty bins, shape (S, B)."""
    return np.where(np.arange(int(bins_S.max())) < bins_S[:, None], 0, CLOSED)


def _emptiest(
    lengths_SN: np.ndarray, rows_S: np.ndarray, bins_S: np.ndarray, cap_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Put rows into the emptiest bins, H at a time; also returns whether every bin is within its capacity."""
    loads_SB = _open_bins(bins_S)
    bin_SN = np.empty(lengths_SN.shape, np.int32)
    steps = np.arange(len(lengths_SN))[:, None]
    width = max(1, int(bins_S.min()) // BINS_PER_ROUND) if bins_S.min() >= 2 * BINS_PER_ROUND else 1
    number_bits = (loads_SB.shape[1] - 1).bit_length()
    for start in range(0, lengths_SN.shape[1], width):
        lengths_SH = lengths_SN[:, start : start + width]
        if width == 1:
            bins_SH = loads_SB.argmin(axis=1)[:, None]
        else:
            ranked = loads_SB << number_bits | np.arange(loads_SB.shape[1])
            ranked.sort(axis=1)
            bins_SH = ranked[:, : lengths_SH.shape[1]] & ((1 << number_bits) - 1)
        loads_SB[steps, bins_SH] += lengths_SH
        bin_SN[:, start : start + width] = bins_SH
    return bin_SN, np.where(loads_SB < CLOSED, loads_SB, 0).max(axis=1) <= cap_tokens


def _best_fit(
    lengths_SN: np.ndarray, rows_S: np.ndarray, bins_S: np.ndarray, cap_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Put each row into the bin with the least sufficient room; also returns whether every row had one.

    An empty bin counts as a failure: a GPU would be without work, and there are enough rows.
    """
    room_SB = np.where(_open_bins(bins_S) == 0, cap_tokens, -1)
    bin_SN = np.empty(lengths_SN.shape, np.int32)
    fits_S = np.ones(len(lengths_SN), bool)
    steps = np.arange(len(lengths_SN))
    for place in range(lengths_SN.shape[1]):
        length_S = lengths_SN[:, place]
        left_SB = room_SB - length_S[:, None]
        bins_S_chosen = np.where(left_SB < 0, CLOSED, left_SB).argmin(axis=1)
        fits_S &= left_SB[steps, bins_S_chosen] >= 0
        room_SB[steps, bins_S_chosen] -= length_S
        bin_SN[:, place] = bins_S_chosen
    unused_S = (room_SB == cap_tokens).any(axis=1)
    return bin_SN, fits_S & ~unused_S


def fill_first(lengths: np.ndarray, cap_tokens: int, most_rows: int) -> np.ndarray:
    """Whether the run's first micro-batch takes each row: the longest, then every one that still fits.

    `lengths` are the tokens of the first step's rows, descending.
    """
    taken = np.zeros(len(lengths), bool)
    room, rows = cap_tokens, most_rows
    for place, length in enumerate(lengths.tolist()):
        if length <= room and rows:
            taken[place] = True
            room, rows = room - length, rows - 1
    return taken
