"""Search for changes with which a run fits: the least harmful to learning first, then the fastest.

Combinations are grouped by their effect on learning. Within a group they are tried in the order of their predicted
slowdown; ties go to the easier change. So the first one that fits has no unnecessary switch. A group whose strongest
combinations do not fit is skipped. A more harmful group is tried only for combinations that are faster than those
found, and shorter rows only if nothing else fits.

The first combination that fits with recomputed layers is tried with fewer of them, which is faster.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cuda_memory.units import GIB
from lean_finetune.memory.advice.fewest_layers import fewer_recomputed
from lean_finetune.memory.advice.run import Run
from lean_finetune.memory.advice.search_space import Candidate, Space
from lean_finetune.memory.advice.step_cost import Costs
from lean_finetune.memory.advice.switch import EFFECTS, LESS_DATA, set_options
from lean_finetune.memory.advice.switches import SWITCHES
from lean_finetune.memory.advice.tracer import Tracer
from lean_finetune.memory.trace.memory_trace import Peak

MOST_FOUND = 4
MOST_FOUND_IN_GROUP = 2
MOST_TRACES = 16
"""So that the search over an 8B model stays below a minute on one core."""
MOST_TRACES_IN_GROUP = 10
LIGHTENING_TRACES = 4
"""Extra traces per group, to remove switches from its strongest combination if no other one fits."""
TRACES_BEYOND = 2
"""Most further traces of a group after the first combination that fits."""
MOST_CONFIRMED = 6
"""Most changed runs to confirm, each of which takes as long as a verdict."""
ROOMY = 0.95
"""Share of what a candidate may need. If all combinations found need more, one that needs less is offered too."""
FASTER = 0.99
"""A more harmful group must be faster than this share of the time of what is found."""
ADVICE_COLUMNS = ["command", "peak_gib", "slowdown", "effect"]


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """Overrides with which the run fits."""

    flags: tuple[str, ...]
    peak_bytes: int
    slowdown: float
    """Predicted time per token relative to the original run."""
    effect: str
    """Effect on learning."""
    host_bytes: int = 0
    """What train.offload needs in the memory of a host."""
    disk_bytes: int = 0
    """What it needs on its disk."""
    step_seconds: float | None = None
    """Predicted time of a step; None if the device's speed is not known."""

    @property
    def command(self) -> str:
        """The command to run."""
        return f"dvc exp run {self.switches}"

    @property
    def switches(self) -> str:
        """Its overrides as command-line options."""
        return set_options(self.flags)

    def as_json(self) -> dict[str, Any]:
        """Its entry in advice.json."""
        return {
            "command": self.command,
            "peak_bytes": self.peak_bytes,
            "slowdown": round(self.slowdown, 2),
            "effect": self.effect,
            "host_bytes": self.host_bytes,
            "disk_bytes": self.disk_bytes,
            "step_seconds": self.step_seconds and round(self.step_seconds, 3),
        }

    def as_row(self) -> dict[str, Any]:
        """Its line in advice.csv."""
        entry = {**self.as_json(), "peak_gib": round(self.peak_bytes / GIB, 3)}
        return {column: entry[column] for column in ADVICE_COLUMNS}


Allowed = Callable[[tuple[str, ...]], bool]
"""Whether params.yaml accepts overrides."""
Confirm = Callable[[Candidate, int], int | None]
"""From a candidate and its traced peak: the peak that the caller's verdict would report; None if it would not fit."""


def advise(
    run: Run,
    costs: Costs,
    *,
    peak: Peak,
    usable_bytes: int,
    allowed: Allowed = lambda flags: True,
    confirm: Confirm | None = None,
) -> list[Remedy]:
    """The best few changes with which a run fits; empty if none is found.

    The predicted `peak` of `run` is more than `usable_bytes`, the largest with which it fits, without its margin. Only
    `allowed` overrides are tried. `confirm` checks a candidate before it is offered.
    """
    space = Space(run, costs)
    search = _Search(run, costs, usable_bytes, allowed, confirm)
    search.traced[space.unchanged.flags] = (space.unchanged, peak)
    with search.bar:
        for effect in range(len(EFFECTS)):
            if search.open and not (effect == LESS_DATA and search.found):
                candidates = space.of_effect(effect)
                search.search_group([c for c in candidates if allowed(c.flags)])
    return search.found


class _Search(Tracer):
    """Collects the candidates that fit."""

    def __init__(self, run: Run, costs: Costs, usable_bytes: int, allowed: Allowed, confirm: Confirm | None):
        super().__init__(run, costs, usable_bytes, most_traces=MOST_TRACES)
        self._allowed, self._confirm = allowed, confirm
        self._refused: set[tuple[str, ...]] = set()
        self._fitting: list[tuple[Candidate, int]] = []

    @property
    def open(self) -> bool:
        """Whether to continue."""
        confirmed = len(self._refused) + len(self._fitting)
        return len(self._fitting) < MOST_FOUND and confirmed < MOST_CONFIRMED and self._traces < MOST_TRACES

    @property
    def _traces(self) -> int:
        """Number of traces, without the trace of the original run."""
        return len(self.traced) - 1

    @property
    def found(self) -> list[Remedy]:
        """What fits, in the order of candidates."""
        return [self._remedy(*found) for found in sorted(self._fitting, key=lambda found: found[0].order)]

    def _remedy(self, candidate: Candidate, peak_bytes: int) -> Remedy:
        """A candidate with its price."""
        host_bytes, disk_bytes = self.costs.offloaded_bytes(candidate.run.setting)
        return Remedy(
            flags=candidate.flags,
            peak_bytes=peak_bytes,
            slowdown=candidate.slowdown,
            effect=candidate.effect_text,
            host_bytes=host_bytes,
            disk_bytes=disk_bytes,
            step_seconds=self.costs.step_time(candidate.run),
        )

    def search_group(self, candidates: Sequence[Candidate]) -> None:
        """Find the candidates of a group that fit without unnecessary switches."""
        fastest = min((c.slowdown for c, _ in self._fitting), default=None)
        wanted = [c for c in candidates if fastest is None or c.slowdown < FASTER * fastest]
        fitting = [candidate for candidate in self._strongest(wanted) if fastest is None and self.fits(candidate)]
        if fastest is None and not fitting:
            return
        # By states, the strongest candidate: if it does not fit, no other one with these states does.
        least_of = {_states(c): c for c in sorted(reversed(candidates), key=lambda c: c.total_level)}
        before, last = len(self._fitting), self._traces + MOST_TRACES_IN_GROUP
        for candidate in wanted:
            if not self.open or self._traces >= last or len(self._fitting) - before >= MOST_FOUND_IN_GROUP:
                break
            possible = self.may_fit(candidate) and self.fits(least_of[_states(candidate)])
            if possible and self._adds(candidate, self._fitting[before:]) and self.fits(candidate):
                self._offer(candidate)
                last = min(self._traces + TRACES_BEYOND, MOST_TRACES)
        if len(self._fitting) == before and fastest is None:
            strongest = min(fitting, key=lambda candidate: candidate.order)
            self._offer(self._lightened(strongest, candidates, self._traces + LIGHTENING_TRACES))
            if self._adds(strongest, self._fitting[before:]):
                self._offer(strongest)

    def _strongest(self, candidates: Sequence[Candidate]) -> Iterator[Candidate]:
        """The candidates with the least states: one without updates in backward, and one with them."""
        for branch in dict.fromkeys(c.level("in_backward") for c in candidates):
            alike = (c for c in candidates if c.level("in_backward") == branch)
            yield min(alike, key=lambda c: (self.costs.least_bytes(c.run.setting), -c.total_level))

    def _lightened(self, candidate: Candidate, candidates: Sequence[Candidate], last: int) -> Candidate:
        """A candidate that fits, without its unnecessary switches. The slowest ones are removed first.

        `last` is the number of traces at which to stop.
        """
        lighter = [c for c in candidates if candidate.covers(c) and c is not candidate]
        for other in lighter:
            changed = sum(a.level != b.level for a, b in zip(candidate.options, other.options, strict=True))
            if changed == 1 and (self._traces < last or other.flags in self.traced) and self.fits(other):
                return self._lightened(other, lighter, last)
        return candidate

    def _adds(self, candidate: Candidate, of_class: Sequence[tuple[Candidate, int]]) -> bool:
        """Whether it changes less than what is found, or leaves room that the only candidate of its group does not."""
        covered = [(other, peak_bytes) for other, peak_bytes in self._fitting if candidate.covers(other)]
        if not covered:
            return True
        tight = all(peak_bytes > ROOMY * self.most_bytes(other) for other, peak_bytes in self._fitting)
        roomy = ROOMY * self.most_bytes(candidate)
        return (
            tight
            and covered == list(of_class)
            and self.bound(candidate) <= roomy
            and self.fits(candidate)
            and self.peak_bytes(candidate) <= roomy
        )

    def _offer(self, candidate: Candidate) -> None:
        """Add a candidate that fits to the result if it is confirmed, with the confirmed peak.

        A faster one with fewer recomputed layers takes the place of the first.
        """
        faster = () if self._fitting else fewer_recomputed(self, candidate)
        for fewer in (one for one in faster if self._allowed(one.flags)):
            if (peak_bytes := self._confirmed(fewer, self.known_peak(fewer).bytes)) is not None:
                self._fitting.append((fewer, peak_bytes))
                return
        peak_bytes = self._confirmed(candidate, self.peak_bytes(candidate))
        if peak_bytes is None:
            self._refused.add(candidate.flags)
        elif candidate.flags not in self._refused:
            self._fitting.append((candidate, peak_bytes))

    def _confirmed(self, candidate: Candidate, traced_bytes: int) -> int | None:
        """The confirmed peak; None if the candidate does not fit."""
        if traced_bytes > self.most_bytes(candidate):
            return None
        return traced_bytes if self._confirm is None else self._confirm(candidate, traced_bytes)


def _states(candidate: Candidate) -> tuple[int, ...]:
    """Levels of the switches that change weights, gradients or optimizer state."""
    return tuple(candidate.level(switch.name) for switch in SWITCHES if switch.changes_states)
