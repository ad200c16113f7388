"""The events of those of a unit's tensors that are in one pool of the allocator, and where they come round."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lean_finetune.memory.allocator.program import Turns
from lean_finetune.memory.allocator.templates import BIRTH, Template


@dataclass(frozen=True, kw_only=True)
class Part:
    """A stretch of actions; of several turns, each frees what it makes and nothing else."""

    start: int
    size: int
    """Actions of a turn."""
    turns: int


@dataclass(frozen=True, kw_only=True, eq=False)
class PoolEvents:
    """The events of the tensors in one pool."""

    actions: np.ndarray
    """As a template's, with the births of this pool alone counted."""
    parts: Sequence[Part]
    """All of them, in order."""
    outliving: Sequence[tuple[int, int]]
    """Rank, and the birth in this pool, of what outlives the unit here."""


def pool_events(template: Template, chosen: np.ndarray) -> PoolEvents:
    """The events of the chosen births and, since tensors of other units may be anywhere, all frees of those."""
    actions = np.array(template.events.actions, dtype=np.int64)
    births = np.where(actions == BIRTH, np.cumsum(actions == BIRTH) - 1, np.maximum(actions, 0))
    here = np.cumsum(chosen) - 1
    kept = (actions < BIRTH) | chosen[births]
    own = np.where(actions >= 0, here[births], actions)[kept]
    places = np.concatenate([[0], np.cumsum(kept)])
    loops = [loop for turns in template.turns if (loop := _closed(own, turns, places)) is not None]
    outliving = [(rank, int(here[birth])) for rank, birth in enumerate(template.events.outliving) if chosen[birth]]
    return PoolEvents(actions=own, parts=_parts(loops, len(own)), outliving=outliving)


def _closed(actions: np.ndarray, turns: Turns, places: np.ndarray) -> Part | None:
    """Turns of a loop such that each frees what it makes and nothing else; None where there are none.

    `places` are those of the template's actions among `actions`.
    """
    if turns.count < 2:
        return None
    bounds = places[turns.start + turns.size * np.arange(turns.count + 1)]
    sizes = set(np.diff(bounds).tolist())
    start, size = int(bounds[0]), int(bounds[1] - bounds[0])
    if len(sizes) != 1 or not size:
        return None
    born = np.cumsum(actions == BIRTH)
    # A free by how many births ago its tensor was made.
    ages = np.where(actions >= 0, born - actions, actions)[start : int(bounds[-1])]
    if (ages[size:] != ages[:-size]).any():
        return None
    for shift in range(size):
        window = actions[start + shift : start + shift + size]
        first = int(born[start + shift - 1]) if start + shift else 0
        freed = window[window != BIRTH]
        if 2 * len(freed) == size and (freed >= first).all():
            return Part(start=start + shift, size=size, turns=turns.count - (shift > 0))
    return None


def _parts(loops: Sequence[Part], count: int) -> list[Part]:
    """Loops, and what lies between them."""
    parts, place = [], 0
    for loop in loops:
        if loop.start > place:
            parts.append(Part(start=place, size=loop.start - place, turns=1))
        parts.append(loop)
        place = loop.start + loop.size * loop.turns
    return [*parts, Part(start=place, size=count - place, turns=1)] if place < count else parts
