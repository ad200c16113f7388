"""Sizes of tensors as exact sums: a constant plus whole multiples of a few figures of the shape."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from lean_finetune.memory.allocator.cut import NotAffine

MOST_TERMS = 2
"""Figures of the shape in the size of one tensor."""


@dataclass(frozen=True, kw_only=True)
class Tie:
    """A figure that went along with another one in all traces, or was constant: nothing is known where it does not."""

    figure: str
    like: str | None
    """The other figure; None for a constant."""
    base: int
    like_base: int
    rise: int
    run: int
    """figure - base : like - like_base = rise : run."""

    def holds(self, figures: Mapping[str, int]) -> bool:
        """Whether it does so in these figures too."""
        other = 0 if self.like is None else figures[self.like]
        return (figures[self.figure] - self.base) * self.run == (other - self.like_base) * self.rise


def tell_apart(names: Sequence[str], samples: Sequence[Mapping[str, int]]) -> tuple[list[str], list[Tie]]:
    """The figures that vary on their own, and how the others go along with one of them."""
    free: list[str] = []
    ties = []
    for name in names:
        if tie := next((t for like in (None, *free) if (t := _tie(name, like, samples)) is not None), None):
            ties.append(tie)
        else:
            free.append(name)
    return free, ties


def _tie(name: str, like: str | None, samples: Sequence[Mapping[str, int]]) -> Tie | None:
    """How a figure follows another one in all samples, or that it is constant; None where it does not."""
    base = samples[0]
    if like is None:
        tie = Tie(figure=name, like=None, base=base[name], like_base=0, rise=0, run=1)
    else:
        other = next(sample for sample in samples if sample[like] != base[like])
        rise, run = other[name] - base[name], other[like] - base[like]
        tie = Tie(figure=name, like=like, base=base[name], like_base=base[like], rise=rise, run=run)
    return tie if all(tie.holds(sample) for sample in samples) else None


def fit_sizes(figures_SF: np.ndarray, sizes_SB: np.ndarray, what: str) -> tuple[np.ndarray, np.ndarray]:
    """Constants (B,) and slopes (F, B), whole numbers that give the sizes (S, B) of S different samples exactly.

    Each birth gets the sum with the fewest figures, without a constant where one is not needed; one sample more than
    it has terms must agree with it.

    Raises:
        NotAffine: there are no such numbers.
    """
    (S, F), B = figures_SF.shape, sizes_SB.shape[1]
    constant, slopes = sizes_SB[0].copy(), np.zeros((F, B), dtype=np.int64)
    unexplained = np.flatnonzero((sizes_SB != constant).any(axis=0))
    for terms in range(1, MOST_TERMS + 1):
        for constants in (0, 1):
            for chosen in map(list, combinations(range(F), terms)):
                design = np.column_stack([np.ones((S, constants)), figures_SF[:, chosen]])
                # Samples that are alike in these figures tell nothing more about them.
                distinct = len(np.unique(figures_SF[:, chosen], axis=0))
                rank = np.linalg.matrix_rank(design)
                if not len(unexplained) or distinct <= terms + constants or rank < terms + constants:
                    continue
                found = np.rint(np.linalg.lstsq(design, sizes_SB[:, unexplained], rcond=None)[0]).astype(np.int64)
                exact = (np.rint(design).astype(np.int64) @ found == sizes_SB[:, unexplained]).all(axis=0)
                constant[unexplained[exact]] = found[0][exact] if constants else 0
                slopes[np.ix_(chosen, unexplained[exact])] = found[constants:][:, exact]
                unexplained = unexplained[~exact]
    if len(unexplained):
        seen = sizes_SB[:, unexplained[0]].tolist()
        raise NotAffine(f"birth {unexplained[0]} of {what}: {seen} bytes are no sum of figures of its {S} shapes")
    return constant, slopes
