"""Mismatched answers of labelled rows: each row's prompt with the answer to another prompt.

By their log-probabilities an objective estimates how far the model is from its reference. They depend on the block and
the side of the split alone, so that the reference of each is computed once.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lean_finetune.data.encode.row_tokenizer import Chunks


def with_mismatches(chunks: Chunks, ids: np.ndarray, max_length: int) -> tuple[Chunks, np.ndarray]:
    """Each row followed by its mismatch, and the ids in which `starts` are indices.

    A mismatch has the row's tokens up to its first trained one, then those from there on of another row. It is cut to
    `max_length` tokens.
    """
    if not len(chunks.rows):
        return chunks, ids
    count = len(chunks.rows)
    bounds = np.searchsorted(chunks.span_chunks, np.arange(count + 1))
    prompts = chunks.spans[bounds[:-1], 0].tolist()
    starts, lengths = chunks.starts.tolist(), chunks.lengths.tolist()
    prompt_ids = [ids[start : start + size] for start, size in zip(starts, prompts, strict=True)]
    parts, spans, span_counts, new_lengths = [ids], [], [], []
    for row, other in enumerate(other_rows([tokens.tobytes() for tokens in prompt_ids])):
        own_spans = _shifted(chunks, bounds, other, prompts[row] - prompts[other], max_length)
        if supervised_tokens(own_spans) < 1:  # One token behind no prompt, which nothing predicts.
            other = row
            own_spans = chunks.spans[bounds[row] : bounds[row + 1]]
        length = int(own_spans[-1, 1])
        answer = starts[other] + prompts[other]
        parts += [prompt_ids[row], ids[answer : answer + length - prompts[row]]]
        spans += [chunks.spans[bounds[row] : bounds[row + 1]], own_spans]
        span_counts += [len(spans[-2]), len(own_spans)]
        new_lengths += [lengths[row], length]
    all_lengths = np.array(new_lengths, np.int64)
    mismatch_starts = len(ids) + np.cumsum(all_lengths[1::2]) - all_lengths[1::2]
    made = replace(
        chunks,
        rows=np.repeat(chunks.rows, 2),
        starts=np.stack([chunks.starts, mismatch_starts], axis=1).ravel(),
        lengths=all_lengths,
        supervised=np.array([supervised_tokens(one) for one in spans], np.int64),
        span_chunks=np.repeat(np.arange(2 * count), span_counts),
        spans=np.concatenate(spans),
    )
    return made, np.concatenate(parts)


def other_rows(prompts: Sequence[bytes]) -> list[int]:
    """For each row the last one before it with another prompt, in a circle; the row before it if all prompts are equal.

    Rows with one prompt often follow each other, and the answer to the same prompt would be no mismatch.
    """
    count = len(prompts)
    if len(set(prompts)) == 1:
        return [(row - 1) % count for row in range(count)]
    found, other = [0] * count, 0
    for row in (*range(count), *range(count)):  # The second round knows what lies before the first row.
        if prompts[row - 1] != prompts[row]:
            other = (row - 1) % count
        found[row] = other
    return found


def supervised_tokens(spans: np.ndarray) -> int:
    """Trained tokens of spans (spans, 2), without the first token of the row, which nothing predicts."""
    return int((spans[:, 1] - np.maximum(spans[:, 0], 1)).sum())


def _shifted(chunks: Chunks, bounds: np.ndarray, row: int, by: int, max_length: int) -> np.ndarray:
    """The spans of a row, moved and cut to `max_length`."""
    spans = chunks.spans[bounds[row] : bounds[row + 1]] + by
    return np.minimum(spans[spans[:, 0] < max_length], max_length)
