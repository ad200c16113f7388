"""Split the rows of a step into micro-batches: by length, packed, or split between GPUs."""

import numpy as np

# Mode packed: join a step's rows without padding into as few micro-batches as possible, evenly filled.
#
# All steps of a block are packed at once: arrays run over steps, Python loops over the rows of a step.
# Legend: S steps, N rows of the longest step, B bins (micro-batches) of a step, H rows placed at once.

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


# Mode bucketed: split a step's rows, sorted by length, into micro-batches padded to their longest row.
#
# All steps of a block are searched at once: arrays run over steps, Python loops over positions within a step.
# Legend: S steps, P groups of the longest step, W candidates in the window.

OVERHEAD_TOKENS = 128
"""Cost of one more micro-batch, in padded tokens.

Seconds = a + b * tokens, fitted to forward and backward of a 6-layer Llama over 10 shapes of 64 to 1,024 tokens on a
2-core CPU, gave a / b = 38 (1 thread) to 91 (2 threads). Rounded up, because accelerators waste more on small batches
(not measured) and too high costs less than too low: on log-normal chat lengths 128 where 64 is true adds 0.3% to the
cost of a run, 64 where 256 is true 2%.
"""
GROUPS_PER_BATCH = 8
"""Rows of equal padded length move in groups of 1/8 of a full micro-batch; finer splits gain nothing."""
SEARCH_STEPS = 10
"""Bisections in the search for the size of even micro-batches: precise to a thousandth."""
NEVER = np.iinfo(np.int64).max // 4
"""Cost of a split that is not allowed."""


def cheapest_splits(padded: np.ndarray, bounds: np.ndarray, cap_tokens: int) -> np.ndarray:
    """Split every step, for one GPU, with the least padded tokens plus overhead.

    A micro-batch of rows i to j - 1 costs padded[i] * (j - i) + OVERHEAD_TOKENS; dynamic programming over j finds the
    cheapest split of every prefix. As lengths descend, a start that loses to a later one at j also loses afterwards, so
    the window of candidates only shrinks from the left. Splits fall between groups of rows (`_group_starts`).

    Returns whether a micro-batch begins at each row, bool. `padded` are padded lengths, int64, descending within each
    step and none above `cap_tokens`; `bounds` where each step begins in `padded`, and the end.
    """
    firsts = _group_starts(padded, bounds, cap_tokens)
    group_bounds = np.searchsorted(firsts, bounds)
    counts_S = np.diff(group_bounds)
    shape = len(counts_S), int(counts_S.max())
    place = np.arange(len(firsts)) - np.repeat(group_bounds[:-1], counts_S)
    step = np.repeat(np.arange(shape[0]), counts_S)
    lengths_SP = np.ones(shape, np.int64)
    lengths_SP[step, place] = padded[firsts]
    rows_before_SP = np.broadcast_to(np.diff(bounds)[:, None], (shape[0], shape[1] + 1)).copy()
    rows_before_SP[step, place] = firsts - bounds[step]
    start_SP = _cheapest_starts(lengths_SP, rows_before_SP, counts_S, cap_tokens)
    begins = np.zeros(len(padded), bool)
    steps, ends = np.arange(shape[0]), counts_S
    while len(steps):
        ends = start_SP[steps, ends]
        begins[firsts[group_bounds[steps] + ends]] = True
        steps, ends = steps[ends > 0], ends[ends > 0]
    return begins


def _group_starts(padded: np.ndarray, bounds: np.ndarray, cap_tokens: int) -> np.ndarray:
    """Starts of groups: rows of one step and one padded length, none above a fraction of `cap_tokens`."""
    new_run = np.append(True, padded[1:] != padded[:-1])
    new_run[bounds[:-1]] = True
    starts = np.flatnonzero(new_run)
    in_run = np.arange(len(padded)) - np.repeat(starts, np.diff(np.append(starts, len(padded))))
    return np.flatnonzero(in_run % np.maximum(1, cap_tokens // (GROUPS_PER_BATCH * padded)) == 0)


def _cheapest_starts(
    lengths_SP: np.ndarray, rows_before_SP: np.ndarray, counts_S: np.ndarray, cap_tokens: int
) -> np.ndarray:
    """Group at which the last micro-batch of the cheapest split of each prefix begins."""
    intercepts_SP = np.empty_like(lengths_SP)
    start_SP = np.zeros_like(rows_before_SP)
    cost_S = np.zeros(len(counts_S), np.int64)
    oldest = 0
    for end in range(1, lengths_SP.shape[1] + 1):
        newest = end - 1
        intercepts_SP[:, newest] = cost_S - lengths_SP[:, newest] * rows_before_SP[:, newest]
        lengths_SW = lengths_SP[:, oldest:end]
        rows_SW = rows_before_SP[:, end, None] - rows_before_SP[:, oldest:end]
        costs_SW = intercepts_SP[:, oldest:end] + lengths_SW * rows_before_SP[:, end, None]
        costs_SW[lengths_SW * rows_SW > cap_tokens] = NEVER
        best_S = costs_SW.argmin(axis=1)
        cost_S = np.take_along_axis(costs_SW, best_S[:, None], axis=1)[:, 0] + OVERHEAD_TOKENS
        start_SP[:, end] = oldest + best_S
        unfinished = counts_S > end
        if unfinished.any():
            oldest += int(best_S[unfinished].min())
    return start_SP


def even_splits(padded: np.ndarray, bounds: np.ndarray, cap_tokens: int, *, ranks: int, done: int) -> np.ndarray:
    """Split every step into micro-batches of nearly equal size: a multiple of `ranks` of them, or one for every row.

    GPUs wait for each other, so the largest of the `ranks` micro-batches that run together decides the time. For each
    number of micro-batches, a bisection finds the least size at which all rows fit. Numbers are tried from the least
    upwards while the cost falls.

    Arguments and result as of `cheapest_splits`; each step has `done` micro-batches already, which count towards the
    multiple.
    """
    rows_S = np.diff(bounds)
    tokens_S = np.add.reduceat(padded, bounds[:-1])
    most_S = -(-(rows_S + done) // ranks)
    turns_S = np.maximum(-(-(tokens_S + done * cap_tokens) // (cap_tokens * ranks)), 1)
    best_cost_S = np.full(len(rows_S), NEVER)
    best_number_S = np.zeros(len(rows_S), np.int64)
    best_size_S = np.full(len(rows_S), cap_tokens)
    trying = np.arange(len(rows_S))
    while len(trying):
        numbers = np.minimum(turns_S[trying] * ranks - done, rows_S[trying])
        sizes = _least_sizes(padded, bounds[trying], rows_S[trying], numbers, tokens_S[trying], cap_tokens)
        _, sizes_SM, fits = _fill(padded, bounds[trying], rows_S[trying], numbers, sizes)
        largest_ST = -np.sort(-sizes_SM, axis=1)[:, ::ranks]
        costs = np.where(fits, largest_ST.sum(axis=1) + OVERHEAD_TOKENS * -(-numbers // ranks), NEVER)
        better = costs < best_cost_S[trying]
        chosen = trying[better]
        best_cost_S[chosen], best_number_S[chosen], best_size_S[chosen] = costs[better], numbers[better], sizes[better]
        more = np.minimum(turns_S[trying] + np.maximum(1, turns_S[trying] // 4), most_S[trying])
        continues = (better | (best_cost_S[trying] == NEVER)) & (more > turns_S[trying])
        turns_S[trying] = more
        trying = trying[continues]
    starts_SM, _, _ = _fill(padded, bounds[:-1], rows_S, best_number_S, best_size_S)
    begins = np.zeros(len(padded) + 1, bool)  # Unused micro-batches begin after their step.
    begins[bounds[:-1, None] + starts_SM[:, :-1]] = True
    return begins[:-1]


def _least_sizes(
    padded: np.ndarray,
    first_S: np.ndarray,
    rows_S: np.ndarray,
    number_S: np.ndarray,
    tokens_S: np.ndarray,
    cap_tokens: int,
) -> np.ndarray:
    """The least size, to a thousandth, at which all rows fit into `number_S` micro-batches; at most `cap_tokens`."""
    low_S = np.minimum(np.maximum(padded[first_S], tokens_S // number_S), cap_tokens)
    high_S = np.full(len(rows_S), cap_tokens)
    for _ in range(SEARCH_STEPS):
        middle_S = (low_S + high_S) // 2
        _, _, fits_S = _fill(padded, first_S, rows_S, number_S, middle_S)
        high_S, low_S = np.where(fits_S, middle_S, high_S), np.where(fits_S, low_S, middle_S)
    return high_S


def _fill(
    padded: np.ndarray, first_S: np.ndarray, rows_S: np.ndarray, number_S: np.ndarray, size_S: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Fill micro-batches one after the other up to a size, leaving at least one row for each later one.

    Returns:
        First row of each micro-batch, and the row after the last one, shape (S, M + 1); padded tokens of each
        micro-batch (S, M); whether all rows of a step fit without exceeding the size (S,).
    """
    starts = [np.zeros(len(rows_S), np.int64)]
    lengths = []
    for number in range(int(number_S.max())):
        lengths.append(padded[first_S + np.minimum(starts[-1], rows_S - 1)])
        taken_S = np.where(number < number_S, np.maximum(size_S // lengths[-1], 1), 0)
        still_S = np.maximum(number_S - 1 - number, 0)
        starts.append(np.minimum(starts[-1] + taken_S, rows_S - still_S))
    starts_SM = np.stack(starts, axis=1)
    sizes_SM = np.diff(starts_SM, axis=1) * np.stack(lengths, axis=1)
    return starts_SM, sizes_SM, (starts[-1] == rows_S) & (sizes_SM.max(axis=1) <= size_S)
