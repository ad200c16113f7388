"""Find the fastest sets of memory switches with which a run fits.

The combinations are those of advice (`memory/advice/search_space.py`), from a plain run on. They are tried by effect on
learning, then by predicted time. A family of combinations differs in the size of micro-batches alone. Its smallest size
is traced first: if that does not fit, none of them does. A peak is convex in the tokens of a micro-batch, since it is
the highest of many instants, each linear in them. So two traced sizes bound all larger ones.
"""

from collections.abc import Sequence
from functools import partial

from lean_finetune.memory.advice.search import FASTER, REFUSED, Fitting, Search
from lean_finetune.memory.advice.search_space import Allowed, Candidate, Space
from lean_finetune.memory.advice.step_cost import Costs
from lean_finetune.memory.advice.verdict import confirmed
from lean_finetune.memory.choice.plain_run import Start
from lean_finetune.memory.switches.switch import SAME

MOST_CHOICES = 3
MOST_TRACES = 24
TRACES_BEYOND = 6
"""Most further traces after the first set that fits, and of a group of faster sets that change training."""
MUCH_LESS = 0.8
"""Share of a faster set's peak from which a slower set with more switches is worth showing."""


class FastestSets(Search):
    """Searches the combinations of one plain run."""

    def __init__(self, start: Start, wanted: Allowed):
        """`wanted`: whether overrides may be tried, besides the rules."""
        run = start.run
        space = Space(run, Costs(run), start.sizes, wanted)
        super().__init__(space, run.fitting_bytes, partial(confirmed, run), most_traces=MOST_TRACES)
        self.start = start
        self.groups: dict[int, list[Candidate]] = {}
        self._most, self._last = MOST_CHOICES, MOST_TRACES

    def candidates(self, effect: int) -> list[Candidate]:
        """The combinations with an effect on learning, in the order in which they are tried."""
        if effect not in self.groups:
            unchanged = [self.space.unchanged] if effect == SAME else []
            self.groups[effect] = [*unchanged, *self.space.of_effect(effect)]
        return self.groups[effect]

    def find(self, most_effect: int, most: int = MOST_CHOICES) -> list[Fitting]:
        """The best `most` sets: the least harmful to learning first, then the fastest; a more harmful one if faster."""
        self._most = most
        with self.bar:
            for effect in range(most_effect + 1):
                if not self.found:
                    self.try_in_order(self.candidates(effect), self.candidates(effect))
                    continue
                if most == 1:
                    break
                best, before = self.found[0].slowdown, self.found
                faster = [one for one in self.candidates(effect) if one.slowdown < FASTER * best]
                self.found, self._most, self._last = [], 1, self._count + TRACES_BEYOND
                self.try_in_order(faster, faster)
                if self.found:
                    self.found = [*before[: most - 1], *self.found]
                    break
                self.found = before
        return self.found

    @property
    def done(self) -> bool:
        """Whether there are enough sets, or traces."""
        return len(self.found) >= self._most or self._count >= self._last

    @property
    def _count(self) -> int:
        return len(self.traced)

    def alike(self, candidate: Candidate) -> tuple[int, ...]:
        """Levels of all switches but the size of micro-batches."""
        return tuple(option.level for option in candidate.options[1:])

    def fits_among(self, one: Candidate, alike: Sequence[Candidate]) -> bool:
        """Whether it fits; a smaller size that probably fits is traced first, which bounds all larger ones."""
        sizes = sorted(alike, key=lambda other: other.most_tokens)
        traced = [other for other in sizes if other.flags in self.traced]
        if len(traced) == 1 and one.flags not in self.traced:
            known, states = traced[0], self.costs.least_bytes(one.run.setting)
            per_token = (self.peak_bytes(known) - states) / known.most_tokens
            tokens = (self.most_bytes(one) - states) / max(per_token, 1)
            likely = [other for other in sizes if known.most_tokens < other.most_tokens <= tokens]
            if likely and likely[-1].most_tokens < one.most_tokens:
                self.peak_bytes(likely[-1])
        return self.fits(one)

    def bound(self, candidate: Candidate) -> int:
        """See the base class; also by two smaller sizes of the same family."""
        alike = [
            (other.most_tokens, peak.bytes)
            for other, peak in self.traced.values()
            if self.alike(other) == self.alike(candidate)
            and other.sums_gradients == candidate.sums_gradients
            and other.most_tokens < candidate.most_tokens
            and peak is not REFUSED
        ]
        least = super().bound(candidate)
        if len(alike) < 2:
            return least
        (fewer, low), (more, high) = sorted(alike)[-2:]
        return max(least, int(high + (high - low) / (more - fewer) * (candidate.most_tokens - more)))

    def adds(self, one: Candidate) -> bool:
        """Whether none of its family is found, and it has fewer switches than each set found, or a much lower peak."""
        if any(self.alike(set_) == self.alike(one) for set_ in self.found):
            return False
        covered = [set_ for set_ in self.found if one.covers(set_)]
        return all(self.bound(one) < MUCH_LESS * set_.prediction.peak.bytes for set_ in covered)

    def offer(self, one: Candidate, *, fewer: bool = True) -> None:
        """See the base class."""
        before = len(self.found)
        super().offer(one, fewer=fewer)
        if len(self.found) > before:
            self._last = min(self._last, self._count + TRACES_BEYOND)
