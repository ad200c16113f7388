"""Linear attention, Mamba 2 and short convolutions of packed rows, in plain PyTorch.

A row of a packed sequence must not see the state that the row before it left, nor its last tokens through a
convolution. transformers leaves that to kernels of other packages; its own functions take one row for each element of
the batch. Here they get packed rows in that form.

Shape legend: R rows, T tokens, D channels, K taps of a convolution. A chunk is the number of tokens that a function
computes at once; the state passes from chunk to chunk.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from types import FunctionType
from typing import Any

import torch

from lean_finetune.model.attention.kernels import PackedRows, note_rows

DELTA_RULE_CHUNK = 64
"""Tokens of a chunk of the delta rule, gated or Kimi's: transformers' default, which no config changes."""

Scan = Callable[..., Any]


class Bands:
    """Packed rows cut after whole chunks, so that each band is a batch of equally long pieces, one of a row.

    The first band has the first chunks of all rows, up to the end of the shortest row; the next has those that follow
    in the rows that are longer, and so on. Without the cuts short rows would be padded to the longest. A scan of the
    bands takes as many steps as one of the longest row.
    """

    def __init__(self, lengths: Sequence[int], chunk: int):
        chunks = [-(-length // chunk) for length in lengths]
        ends = [count * chunk for count in sorted(set(chunks))]
        self._spans = list(zip([0, *ends[:-1]], ends, strict=True))
        # Longest first: the rows that go on are the first ones of each band.
        by_length = sorted(range(len(lengths)), key=lambda row: -chunks[row])
        self._rows = [[row for row in by_length if chunks[row] * chunk >= end] for _, end in self._spans]
        self._sizes = {
            (row, band): min(lengths[row], end) - start
            for row in range(len(lengths))
            for band, (start, end) in enumerate(self._spans)
            if lengths[row] > start
        }

    def split(self, packed_1T: torch.Tensor) -> list[torch.Tensor]:
        """(1, T, …) → for each band (R, T, …), with zeros behind rows that end inside of their last chunk."""
        pieces = dict(zip(self._sizes, packed_1T.squeeze(0).split([*self._sizes.values()]), strict=True))
        bands = []
        for band, (start, end) in enumerate(self._spans):
            parts = []
            for row in self._rows[band]:
                parts.append(pieces[row, band])
                if padding := end - start - self._sizes[row, band]:
                    parts.append(packed_1T.new_zeros(padding, *packed_1T.shape[2:]))
            bands.append(torch.cat(parts).unflatten(0, (len(self._rows[band]), end - start)))
        return bands

    def join(self, bands: Sequence[torch.Tensor]) -> torch.Tensor:
        """The inverse of `split`."""
        pieces: dict[tuple[int, int], torch.Tensor] = {}
        for band, ((start, end), tensor) in enumerate(zip(self._spans, bands, strict=True)):
            places = [(row, band) for row in self._rows[band]]
            sizes = [size for place in places for size in (self._sizes[place], end - start - self._sizes[place])]
            pieces |= dict(zip(places, tensor.flatten(0, 1).split(sizes)[::2], strict=True))
        return torch.cat([pieces[place] for place in self._sizes])[None]


def _delta_rule(rule: Scan) -> Scan:
    """The delta rule of a family, (1, T, heads, D) → the same shape, that takes packed rows too."""

    @wraps(rule)
    def of_rows(*tokens: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **options: Any) -> Any:
        packed_rows: PackedRows | None = options.pop("packed_rows", None)
        note_rows(packed_rows)
        if packed_rows is None:
            return rule(*tokens, g=g, beta=beta, **options)
        bands = Bands(packed_rows.lengths, DELTA_RULE_CHUNK)
        state, outputs = None, []
        options |= {"chunk_size": DELTA_RULE_CHUNK, "output_final_state": True}
        for query, key, value, decay, strength in zip(*map(bands.split, (*tokens, g, beta)), strict=True):
            options["initial_state"] = None if state is None else state[: len(query)]
            output, state = rule(query, key, value, g=decay, beta=strength, **options)
            outputs.append(output)
        return bands.join(outputs), None

    return of_rows


def _mamba2_scan(scan: Scan) -> Scan:
    """Mamba 2's scan of a family, (1, T, heads, D) → the same shape, that takes packed rows too."""

    @wraps(scan)
    def of_rows(hidden_states: Any, dt: Any, A: Any, B: Any, C: Any, chunk_size: int, **options: Any) -> Any:
        packed_rows: PackedRows | None = options.pop("packed_rows", None)
        note_rows(packed_rows)
        if packed_rows is None:
            return scan(hidden_states, dt, A, B, C, chunk_size, **options)
        bands = Bands(packed_rows.lengths, chunk_size)
        state, outputs = None, []
        options |= {"return_final_states": True}
        for x, step, b, c in zip(*map(bands.split, (hidden_states, dt, B, C)), strict=True):
            options["initial_states"] = None if state is None else state[: len(x)]
            output, state = scan(x, step, A, b, c, chunk_size, **options)
            outputs.append(output)
        return bands.join(outputs)

    return of_rows


def _convolution(convolution: Scan) -> Scan:
    """A family's causal convolution, (1, D, T) → the same shape, that takes packed rows too."""

    @wraps(convolution)
    def of_rows(hidden_states: torch.Tensor, weight: torch.Tensor, *more: Any, **options: Any) -> torch.Tensor:
        packed_rows: PackedRows | None = options.pop("packed_rows", None)
        note_rows(packed_rows)
        if packed_rows is None:
            return convolution(hidden_states, weight, *more, **options)
        # Zeros between rows: as many as the first token of a row sees before it.
        zeros = hidden_states.new_zeros(*hidden_states.shape[:-1], weight.shape[-1] - 1)
        apart = [part for row in hidden_states.split(packed_rows.lengths, -1) for part in (row, zeros)]
        output = convolution(torch.cat(apart, dim=-1), weight, *more, **options)
        sizes = [size for length in packed_rows.lengths for size in (length, zeros.shape[-1])]
        return torch.cat(output.split(sizes, -1)[::2], dim=-1)

    return of_rows


def _once(wrapped: Callable[[Scan], Scan]) -> Callable[[Any], Any]:
    """Makes a function take packed rows too, unless it does."""
    return lambda function: function if function.__code__.co_filename == __file__ else wrapped(function)


OF_PACKED_ROWS = {
    "causal_conv1d_fn": _once(_convolution),
    "chunk_kimi_delta_attention": _once(_delta_rule),
    "mamba2_chunk_scan": _once(_mamba2_scan),
    "torch_chunk_gated_delta_rule": _once(_delta_rule),
}
"""What makes functions of families' code take `packed_rows` too, by their name there."""


def with_global(function: Any, name: str, value: Callable[..., Any]) -> FunctionType:
    """A copy of a function that sees another value for one global name of its module."""
    assert name in function.__code__.co_names
    copy = FunctionType(
        function.__code__, {**function.__globals__, name: value}, function.__name__, function.__defaults__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
