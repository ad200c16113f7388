"""Loops in a sequence of tokens, found by comparing three that differ in how often they run.

Where a loop runs once more, a block is inserted behind what both sequences have in common; where it runs twice more,
the same block twice. What is not explained that way, to the last token, is refused.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from lean_finetune.memory.allocator.cut import NotAffine

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class Insertion(Generic[T]):
    """A block that is there once more with every turn of its loop."""

    place: int
    """In the sequence of the fewest turns: before this token."""
    block: tuple[T, ...]


def find_loops(fewest: Sequence[T], more: Sequence[T], most: Sequence[T]) -> list[Insertion[T]]:
    """The blocks that one more turn inserts, in order.

    Raises:
        NotAffine: the three do not differ by blocks, once and twice.
    """
    found: list[Insertion[T]] = []
    i = j = k = 0
    while True:
        while i < len(fewest) and j < len(more) and k < len(most) and fewest[i] == more[j] == most[k]:
            i, j, k = i + 1, j + 1, k + 1
        surplus = len(more) - j - (len(fewest) - i)
        if not surplus and i == len(fewest) and k == len(most):
            return found
        if surplus < 1 or len(most) - k - (len(more) - j) != surplus:
            raise NotAffine(f"loops do not repeat: token {i} of {len(fewest)} is followed by others")
        size = _block_size(fewest[i:], more[j:], most[k:], surplus)
        if size is None:
            raise NotAffine(f"loops do not repeat: no block explains what follows token {i} of {len(fewest)}")
        found.append(Insertion(place=i, block=tuple(more[j : j + size])))
        j, k = j + size, k + 2 * size


def _block_size(fewest: Sequence[T], more: Sequence[T], most: Sequence[T], longest: int) -> int | None:
    """Size of the shortest block at the head of `more`, twice at that of `most`, behind which all three agree."""
    for size in range(1, longest + 1):
        if most[size] != most[0]:
            continue
        behind = more[size : size + 1]
        if (
            fewest[:1] == behind == most[2 * size : 2 * size + 1]
            and more[:size] == most[:size] == most[size : 2 * size]
        ):
            return size
    return None
