"""What would make a run fit: combinations of changes, the least harmful first, then the fastest.

Changes come in classes by what they do to learning. Within the first class that holds a way to fit, and on into the
next ones until enough are found (shorter rows only where nothing else is), combinations are tried in the order of their
predicted slow-down; ties go by how easy a change is, from the token budget to shorter rows. States alone rule out what
cannot fit; the strongest combination of a class is traced first, and where that does not fit, the class is left.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tqdm import tqdm

from stages.estimate.kernels import Target
from stages.estimate.options import EFFECTS, LESS_DATA, Candidate, candidates_of
from stages.estimate.predict import predict
from stages.estimate.workload import Costs, Workload
from stages.units import GIB

MOST_FOUND = 4
MOST_TRACES = 14
"""So that the search over an 8B model stays below a minute on one core."""
MOST_CONFIRMED = 6
"""Changed runs that are held against the device as the stage holds its own: each takes as long as its verdict."""
ADVICE_COLUMNS = ["command", "peak_gib", "slowdown", "effect"]


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """Changes with which the run fits."""

    flags: tuple[str, ...]
    peak_bytes: int
    slowdown: float
    """Times as long a token takes, predicted."""
    effect: str
    """What it does to learning."""

    @property
    def command(self) -> str:
        """The line to run."""
        return f"dvc exp run {self.switches}"

    @property
    def switches(self) -> str:
        """Its flags as they are given."""
        return " ".join(f"-S {flag}" for flag in self.flags)

    def as_json(self) -> dict[str, Any]:
        """As advice.json holds it."""
        return {
            "command": self.command,
            "peak_bytes": self.peak_bytes,
            "slowdown": round(self.slowdown, 2),
            "effect": self.effect,
        }

    def as_row(self) -> dict[str, Any]:
        """As advice.csv holds it."""
        return {
            "command": self.command,
            "peak_gib": round(self.peak_bytes / GIB, 3),
            "slowdown": round(self.slowdown, 2),
            "effect": self.effect,
        }


Confirm = Callable[[Workload], int | None]
"""The predicted peak of a changed run where the stage would say that it fits; None where it would not."""


def advise(
    run: Workload,
    costs: Costs,
    target: Target,
    *,
    usable_bytes: int,
    native_bf16: bool,
    progress: bool,
    confirm: Confirm | None = None,
) -> list[Remedy]:
    """The best few changes with which a run fits; none where none is found.

    `native_bf16` says whether the device offers precision bf16; `progress` shows a bar on standard error; what does
    not pass `confirm` is not offered.
    """
    search = _Search(target, costs, usable_bytes, progress, confirm)
    candidates = sorted(candidates_of(run, costs, native_bf16), key=lambda candidate: candidate.order)
    with search.bar:
        for effect in range(len(EFFECTS)):
            of_class = [candidate for candidate in candidates if candidate.effect == effect]
            if of_class and search.open and not (effect == LESS_DATA and search.found):
                search.look_through(of_class)
    return search.found


class _Search:
    """Traces candidates and keeps those that fit."""

    def __init__(self, target: Target, costs: Costs, usable_bytes: int, progress: bool, confirm: Confirm | None):
        self._target, self._costs, self._usable, self._confirm = target, costs, usable_bytes, confirm
        self._refused: set[tuple[str, ...]] = set()
        self._peaks: dict[tuple[str, ...], int] = {}
        self._traced: list[Candidate] = []
        self._fitting: list[tuple[Candidate, int]] = []
        self.bar = tqdm(total=MOST_TRACES, desc="advice", unit=" traces", disable=not progress)

    @property
    def open(self) -> bool:
        """Whether more may be looked for."""
        confirmed = len(self._refused) + len(self._fitting)
        return len(self._fitting) < MOST_FOUND and confirmed < MOST_CONFIRMED and len(self._peaks) < MOST_TRACES

    @property
    def found(self) -> list[Remedy]:
        """What fits, in the order of candidates."""
        return [
            Remedy(flags=c.flags, peak_bytes=peak_bytes, slowdown=c.slowdown, effect=EFFECTS[c.effect])
            for c, peak_bytes in sorted(self._fitting, key=lambda found: found[0].order)
        ]

    def look_through(self, candidates: Sequence[Candidate]) -> None:
        """Find those of a class that fit and do no more than needed."""
        strongest = max(candidates, key=lambda c: [option.strength for option in c.options])
        strongest = max(candidates, key=lambda c: (sum(c.covers(other) for other in candidates), c is strongest))
        if not self._fits(strongest):
            return
        before = len(self._fitting)
        for candidate in candidates:
            if not self.open:
                break
            if not self._covers_one(candidate) and self._fits(candidate):
                self._offer(candidate)
        if len(self._fitting) == before and strongest.flags not in self._refused and not self._covers_one(strongest):
            self._offer(strongest)

    def _covers_one(self, candidate: Candidate) -> bool:
        """Whether less than a candidate fits already."""
        return any(candidate.covers(other) for other, _ in self._fitting)

    def _offer(self, candidate: Candidate) -> None:
        """Keep a candidate whose tensors fit if it is confirmed, with the peak found there."""
        peak_bytes = self._peaks[candidate.flags] if self._confirm is None else self._confirm(candidate.run)
        if peak_bytes is None:
            self._refused.add(candidate.flags)
        else:
            self._fitting.append((candidate, peak_bytes))

    def _fits(self, candidate: Candidate) -> bool:
        """Whether a candidate fits, traced where neither states alone nor another candidate's trace tell."""
        if candidate.flags not in self._peaks:
            if self._floor(candidate) > self._usable:
                return False
            run = candidate.run
            self._peaks[candidate.flags] = predict(run.config, run.setting, run.steps, self._target).peak.bytes
            self._traced.append(candidate)
            self.bar.update()
        return self._peaks[candidate.flags] <= self._usable

    def _floor(self, candidate: Candidate) -> int:
        """Bytes that a candidate holds at least.

        Its states; and, where one that differs in the optimizer alone was traced, that peak less what the states save:
        the optimizer changes nothing else.
        """
        states = self._costs.least_bytes(candidate.run.setting)
        floors = [states]
        for other in self._traced:
            same = replace(other.run.setting, optimizer=candidate.run.setting.optimizer) == candidate.run.setting
            if same and other.run.steps == candidate.run.steps:
                floors.append(self._peaks[other.flags] - self._costs.least_bytes(other.run.setting) + states)
        return max(floors)
