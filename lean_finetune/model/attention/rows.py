"""Joined rows and divided rows in the forward pass of a decoder, and how they reach its attention.

Shape legend: B rows (1 where they are joined), H query heads, T tokens, D head size, R joined rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import masking_utils


@dataclass(frozen=True, kw_only=True, eq=False)
class JoinedRows:
    """The rows of a joined sequence (1, T). Padding at its end counts as further rows."""

    lengths: tuple[int, ...]
    """Tokens of each row, in order; they sum to T."""
    offsets: torch.Tensor
    """int32 of shape (R + 1,): the first token of each row, and T."""
    positions_BT: torch.Tensor
    """int64 of shape (1, T): each token's position in its row."""

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "JoinedRows":
        """The same rows with tensors on another device."""
        return JoinedRows(
            lengths=self.lengths,
            offsets=self.offsets.to(device, non_blocking=non_blocking),
            positions_BT=self.positions_BT.to(device, non_blocking=non_blocking),
        )


class TokenExchange(ABC):
    """Exchanges tokens for heads among the processes that each have a part of every row's tokens."""

    def __init__(self, *, parts: int, index: int):
        """`parts` is the number of processes, `index` (from 0) this process and the part of each row that it has."""
        self.parts, self.index = parts, index

    @abstractmethod
    def to_heads(self, heads_BHtD: torch.Tensor) -> torch.Tensor:
        """All heads of this process's tokens → this process's heads of all tokens, (B, H / parts, T, D)."""

    @abstractmethod
    def to_tokens(self, out_BTHD: torch.Tensor) -> torch.Tensor:
        """This process's heads of all tokens → all heads of this process's tokens, (B, T / parts, H, D)."""


def key_copies(heads: int, key_heads: int, parts: int) -> int:
    """The fewest copies of each key/value head that can be divided into `parts`, which divides the query heads."""
    groups = heads // key_heads
    return next(n for n in range(1, groups + 1) if groups % n == 0 and key_heads * n % parts == 0)


@dataclass
class CurrentForward:
    """State of the running forward pass, for functions that transformers calls without our arguments."""

    rows_are_joined: bool = False
    parts: int = 1
    """Processes among which the tokens of each row are divided."""
    got_rows: list[bool] = field(default_factory=list)
    """For each call of attention with joined or divided rows: whether it received them."""


current = CurrentForward()


def rows_reached_attention() -> bool:
    """Whether every call of attention in the last forward got the joined rows, or the exchange of divided ones."""
    return all(current.got_rows)


@contextmanager
def maskless_forward(
    joined_rows: JoinedRows | None, positions_BT: torch.Tensor | None = None, exchange: TokenExchange | None = None
) -> Iterator[dict[str, Any]]:
    """A context for a decoder's forward without a mask; yields the arguments for joined rows, and for divided ones.

    With an `exchange`, `positions_BT` belong to this process's tokens. Rows and exchange are arguments, so that
    recomputation in backward gets them again. Masks are made at the start of the forward, which gets no argument of
    ours, so global flags decide them. transformers would first search the positions for joined rows, and wait for the
    GPU to see whether there are any.
    """
    current.rows_are_joined = joined_rows is not None
    current.parts = 1 if exchange is None else exchange.parts
    current.got_rows.clear()
    search, masking_utils.find_packed_sequence_indices = masking_utils.find_packed_sequence_indices, _no_joined_rows
    try:
        rows = {} if joined_rows is None else {"position_ids": joined_rows.positions_BT, "joined_rows": joined_rows}
        yield rows if exchange is None else {**rows, "position_ids": positions_BT, "exchange": exchange}
    finally:
        masking_utils.find_packed_sequence_indices = search
        current.rows_are_joined, current.parts = False, 1


def _no_joined_rows(position_ids: torch.Tensor) -> None:
    """Replaces transformers' search for joined rows; finds none."""
