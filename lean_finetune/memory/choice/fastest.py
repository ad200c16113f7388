"""Find the fastest sets of memory switches with which a run fits.

The combinations are those of advice (`memory/advice/search_space.py`), from a plain run on. They are tried by effect on
learning, then by predicted time. A family of combinations differs in the size of micro-batches alone. Its smallest size
is traced first: if that does not fit, none of them does. A peak is convex in the tokens of a micro-batch, since it is
the highest of many instants, each linear in them. So two traced sizes bound all larger ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lean_finetune.memory.advice.plan_memory import PlanMemory
from lean_finetune.memory.advice.run import Run
from lean_finetune.memory.advice.search import FASTER, REFUSED, Tracer, fewer_recomputed
from lean_finetune.memory.advice.search_space import MICRO_BATCH, Allowed, Candidate, Space
from lean_finetune.memory.advice.step_cost import Costs
from lean_finetune.memory.advice.verdict import confirmed_run
from lean_finetune.memory.choice.plain_run import Start
from lean_finetune.memory.predict.peak import Prediction

MOST_CHOICES = 3
MOST_TRACES = 24
TRACES_BEYOND = 6
"""Most further traces after the first set that fits, and of a group of faster sets that change training."""
MUCH_LESS = 0.8
"""Share of a faster set's peak from which a slower set with more switches is worth showing."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A set of switches with which the run fits."""

    candidate: Candidate
    """Its run has the padding of the rows."""
    run: Run
    """With full micro-batches, as `fit` predicts them."""
    prediction: Prediction
    memory: PlanMemory | None
    flags: dict[str, str]
    """Overrides by key."""

    @property
    def slowdown(self) -> float:
        """Time per row relative to the plain run."""
        return self.candidate.slowdown


class FastestSets(Tracer):
    """Searches the combinations of one plain run."""

    def __init__(self, start: Start, wanted: Allowed):
        """`wanted`: whether overrides may be tried, besides the rules."""
        self.start = start
        run = start.run
        super().__init__(run, Costs(run), run.fitting_bytes, most_traces=MOST_TRACES)
        self._space = Space(run, self.costs, start.sizes, wanted)
        self.groups: dict[int, list[Candidate]] = {}
        self.choices: list[Choice] = []
        self._last = MOST_TRACES

    def candidates(self, effect: int) -> list[Candidate]:
        """The combinations with an effect on learning, in the order in which they are tried."""
        if effect not in self.groups:
            found = self._space.of_effect(effect)
            if effect == 0:
                found.insert(0, self._space.unchanged)
            self.groups[effect] = found
        return self.groups[effect]

    def find(self, most_effect: int, most: int = MOST_CHOICES) -> list[Choice]:
        """The best `most` sets: the least harmful to learning first, then the fastest; a more harmful one if faster."""
        with self.bar:
            for effect in range(most_effect + 1):
                if not self.choices:
                    self._search(self.candidates(effect), most)
                    continue
                if most == 1:
                    break
                best, before = self.choices[0].slowdown, self.choices
                faster = [one for one in self.candidates(effect) if one.slowdown < FASTER * best]
                self.choices, self._last = [], self._count + TRACES_BEYOND
                self._search(faster, 1)
                if self.choices:
                    self.choices = [*before[: most - 1], *self.choices]
                    break
                self.choices = before
        return self.choices

    def _search(self, candidates: Sequence[Candidate], most: int) -> None:
        families: dict[tuple[int, ...], list[Candidate]] = {}
        for one in candidates:
            families.setdefault(_family(one), []).append(one)
        for one in candidates:
            if len(self.choices) >= most or self._count >= self._last:
                return
            family = families[_family(one)]
            if any(_family(choice.candidate) == _family(one) for choice in self.choices) or not self.may_fit(one):
                continue
            smallest = max(family, key=lambda other: other.level(MICRO_BATCH))
            if self.fits(smallest) and self._adds(one) and self._fits_here(one, family):
                self._choose(one)

    @property
    def _count(self) -> int:
        return len(self.traced)

    def _fits_here(self, one: Candidate, family: Sequence[Candidate]) -> bool:
        """Whether it fits; a smaller size that probably fits is traced first, which bounds all larger ones."""
        sizes = sorted(family, key=lambda other: other.most_tokens)
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
        """See Tracer; also by two smaller sizes of the same family."""
        alike = [
            (other.most_tokens, peak.bytes)
            for other, peak in self.traced.values()
            if _family(other) == _family(candidate)
            and other.sums_gradients == candidate.sums_gradients
            and other.most_tokens < candidate.most_tokens
            and peak is not REFUSED
        ]
        least = super().bound(candidate)
        if len(alike) < 2:
            return least
        (fewer, low), (more, high) = sorted(alike)[-2:]
        return max(least, int(high + (high - low) / (more - fewer) * (candidate.most_tokens - more)))

    def _adds(self, one: Candidate) -> bool:
        """Whether it has fewer switches than each set found, or a much lower peak."""
        covered = [choice for choice in self.choices if one.covers(choice.candidate)]
        return all(self.bound(one) < MUCH_LESS * choice.prediction.peak.bytes for choice in covered)

    def _choose(self, one: Candidate) -> None:
        """Add a set, or a faster one that recomputes fewer layers, if its own verdict accepts it."""
        fewer = [(other, 0) for other in fewer_recomputed(self, one) if self._space.allows(other.flags)]
        for other, traced_bytes in (*fewer, (one, self.peak_bytes(one))):
            if (found := confirmed_run(self.run, other, traced_bytes)) is not None:
                break
        else:  # Reserved memory, the host or a later stage.
            return
        one, (run, prediction, memory) = other, found
        flags = dict(text.split("=", 1) for text in (*self.start.flags, *one.flags))
        self.choices.append(Choice(candidate=one, run=run, prediction=prediction, memory=memory, flags=flags))
        self._last = min(self._last, self._count + TRACES_BEYOND)


def _family(candidate: Candidate) -> tuple[int, ...]:
    """Levels of all switches but the size of micro-batches."""
    return tuple(option.level for option in candidate.options[1:])
