"""What would make a run fit: combinations of changes, the least harmful first, then the fastest.

Changes come in classes by what they do to learning. Within a class, combinations are tried in the order of their
predicted slow-down, so that the first one that fits has no switch too many; ties go by how easy a change is, from the
token budget to shorter rows. A class whose strongest combinations do not fit is left. A later class is tried only for
what is faster than all that was found, shorter rows only where nothing else fits.

A trace takes seconds, so a combination is traced only where no bound rules it out: what a traced one needs beside its
states, one that saves no more of it needs as well, in proportion to the tokens of a micro-batch.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from lean_finetune.core.errors import UserError
from lean_finetune.core.units import GIB
from lean_finetune.memory.advice.search_space import EFFECTS, LESS_DATA, Candidate, Space
from lean_finetune.memory.advice.workload import Costs, Workload
from lean_finetune.memory.predict.peak import predict
from lean_finetune.memory.trace.cuda_kernels import Target
from lean_finetune.memory.trace.memory_trace import ACTIVATIONS, LOGITS, Peak

MOST_FOUND = 4
MOST_FOUND_OF_CLASS = 2
MOST_TRACES = 16
"""So that the search over an 8B model stays below a minute on one core."""
MOST_TRACES_OF_CLASS = 10
LIGHTENING_TRACES = 4
"""More of a class, to take switches away from its strongest combination where no other was found to fit."""
TRACES_BEYOND = 2
"""Of a class, at most, for a further way once one is found."""
MOST_CONFIRMED = 6
"""Changed runs that are held against the device as the stage holds its own: each takes as long as its verdict."""
ROOMY = 0.95
"""Of what is usable: beside a way that takes more, one that takes less is offered too."""
FASTER = 0.99
"""Of the time of what is found already: a class that does more to learning must be below."""
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


Confirm = Callable[[Candidate, int], int | None]
"""Of a changed run and its peak as the search knows it: its peak where the tool itself would say that it fits; None
where it would not, or would refuse the change."""


def advise(
    run: Workload,
    costs: Costs,
    target: Target,
    *,
    peak: Peak,
    usable_bytes: int,
    native_bf16: bool,
    progress: bool,
    confirm: Confirm | None = None,
) -> list[Remedy]:
    """The best few changes with which a run fits; none where none is found.

    Args:
        run: what does not fit.
        costs: of it.
        target: the device's rules.
        peak: of the run as it is, predicted.
        usable_bytes: what has to do.
        native_bf16: whether the device offers precision bf16.
        progress: show a bar on standard error.
        confirm: what does not pass it is not offered.
    """
    space = Space(run, costs, native_bf16)
    search = _Search(target, costs, usable_bytes, progress, confirm)
    search.knows(space.unchanged, peak)
    with search.bar:
        for effect in range(len(EFFECTS)):
            if search.open and not (effect == LESS_DATA and search.found):
                search.look_through(space.of_effect(effect))
    return search.found


class _Search:
    """Traces candidates and keeps those that fit."""

    def __init__(self, target: Target, costs: Costs, usable_bytes: int, progress: bool, confirm: Confirm | None):
        self._target, self._costs, self._usable, self._confirm = target, costs, usable_bytes, confirm
        self._refused: set[tuple[str, ...]] = set()
        self._traced: dict[tuple[str, ...], tuple[Candidate, Peak]] = {}
        self._fitting: list[tuple[Candidate, int]] = []
        self.bar = tqdm(total=MOST_TRACES, desc="advice", unit=" traces", disable=not progress)

    @property
    def open(self) -> bool:
        """Whether more may be looked for."""
        confirmed = len(self._refused) + len(self._fitting)
        return len(self._fitting) < MOST_FOUND and confirmed < MOST_CONFIRMED and self._traces < MOST_TRACES

    @property
    def _traces(self) -> int:
        """Traces made: that of the run as it is was given."""
        return len(self._traced) - 1

    @property
    def found(self) -> list[Remedy]:
        """What fits, in the order of candidates."""
        return [
            Remedy(flags=c.flags, peak_bytes=peak_bytes, slowdown=c.slowdown, effect=EFFECTS[c.effect])
            for c, peak_bytes in sorted(self._fitting, key=lambda found: found[0].order)
        ]

    def knows(self, candidate: Candidate, peak: Peak) -> None:
        """Take note of a peak."""
        self._traced[candidate.flags] = (candidate, peak)

    def look_through(self, candidates: Sequence[Candidate]) -> None:
        """Find those of a class that fit and do no more than needed."""
        fastest = min((c.slowdown for c, _ in self._fitting), default=None)
        wanted = [c for c in candidates if fastest is None or c.slowdown < FASTER * fastest]
        fitting = [candidate for candidate in self._strongest(wanted) if fastest is None and self._fits(candidate)]
        if fastest is None and not fitting:
            return
        least_of = _strongest_by_states(candidates)
        before, last = len(self._fitting), self._traces + MOST_TRACES_OF_CLASS
        for candidate in wanted:
            if not self.open or self._traces >= last or len(self._fitting) - before >= MOST_FOUND_OF_CLASS:
                break
            possible = self._may_fit(candidate) and self._fits(least_of[_states(candidate)])
            if possible and self._adds(candidate, self._fitting[before:]) and self._fits(candidate):
                self._offer(candidate)
                last = min(self._traces + TRACES_BEYOND, MOST_TRACES)
        if len(self._fitting) == before and fastest is None:
            strongest = min(fitting, key=lambda candidate: candidate.order)
            self._offer(self._lightened(strongest, candidates, self._traces + LIGHTENING_TRACES))
            if self._adds(strongest, self._fitting[before:]):
                self._offer(strongest)

    def _strongest(self, candidates: Iterable[Candidate]) -> Iterable[Candidate]:
        """Those that hold least: without updates in backward, and with them, which exclude other switches."""
        best: dict[int, tuple[tuple[int, int], Candidate]] = {}
        for candidate in candidates:
            strength = sum(option.strength for option in candidate.options)
            key = (self._costs.least_bytes(candidate.run.setting), -strength)
            branch = candidate.strength("in_backward")
            if branch not in best or key < best[branch][0]:
                best[branch] = key, candidate
        return [candidate for _, candidate in best.values()]

    def _lightened(self, candidate: Candidate, candidates: Sequence[Candidate], last: int) -> Candidate:
        """A candidate that fits without the switches that it can do without, the slowest taken away first.

        `last` is the number of traces after which no more are made.
        """
        lighter = [c for c in candidates if candidate.covers(c) and c is not candidate]
        for other in lighter:
            changed = sum(a.strength != b.strength for a, b in zip(candidate.options, other.options, strict=True))
            if changed == 1 and (self._traces < last or other.flags in self._traced) and self._fits(other):
                return self._lightened(other, lighter, last)
        return candidate

    def _adds(self, candidate: Candidate, of_class: Sequence[tuple[Candidate, int]]) -> bool:
        """Whether it does less than what is found, or leaves the room that the only way of its class does not."""
        covered = [(other, peak_bytes) for other, peak_bytes in self._fitting if candidate.covers(other)]
        if not covered:
            return True
        roomy = ROOMY * self._usable
        tight = all(peak_bytes > roomy for _, peak_bytes in self._fitting) and covered == list(of_class)
        return tight and self._bound(candidate) <= roomy and self._fits(candidate) and self._peak(candidate) <= roomy

    def _offer(self, candidate: Candidate) -> None:
        """Keep a candidate whose tensors fit if it is confirmed, with the peak found there."""
        peak_bytes: int | None = self._peak(candidate)
        if self._confirm is not None:
            assert peak_bytes is not None
            peak_bytes = self._confirm(candidate, peak_bytes)
        if peak_bytes is None:
            self._refused.add(candidate.flags)
        elif candidate.flags not in self._refused:
            self._fitting.append((candidate, peak_bytes))

    def _fits(self, candidate: Candidate) -> bool:
        """Whether a candidate fits, traced where neither a bound nor another candidate's trace tell."""
        return self._may_fit(candidate) and self._peak(candidate) <= self._usable

    def _may_fit(self, candidate: Candidate) -> bool:
        """Whether no bound rules it out, nor a stronger combination that does not fit."""
        if candidate.flags in self._traced:
            return True
        stronger = any(peak.bytes > self._usable and other.covers(candidate) for other, peak in self._traced.values())
        return not stronger and self._bound(candidate) <= self._usable

    def _peak(self, candidate: Candidate) -> int:
        """Its predicted peak; more than any device has where the tool refuses it."""
        if candidate.flags not in self._traced:
            run = candidate.run
            try:
                peak = predict(run.config, run.setting, run.steps, self._target).peak
            except UserError:  # GPUs that cannot share the model so, say: no way to fit.
                peak = REFUSED
            self.knows(candidate, peak)
            self.bar.update()
        return self._traced[candidate.flags][1].bytes

    def _bound(self, candidate: Candidate) -> int:
        """Bytes that a candidate holds at least, by its states and by what was traced."""
        setting = candidate.run.setting
        least, gradients = self._costs.least_bytes(setting), self._costs.gradient_bytes(setting)
        states = least + self._costs.gathered_bytes(setting)
        bounds = [least, states - (0 if _sums_gradients(candidate) else gradients)]
        for other, peak in self._traced.values():
            if peak is REFUSED or not _holds_as_much(other, candidate):
                continue
            beside = peak.bytes - self._costs.least_bytes(other.run.setting)
            beside -= self._costs.gathered_bytes(other.run.setting) + _saved_bytes(other, candidate, peak)
            both = _sums_gradients(other) and _sums_gradients(candidate)
            if not _sums_gradients(other):
                beside += self._costs.gradient_bytes(other.run.setting)
            share = min(1.0, _most_tokens(candidate) / _most_tokens(other))
            bounds.append(states - (0 if both else gradients) + int(share * beside))
        return max(bounds)


REFUSED = Peak(bytes=1 << 62, by_category={})
"""Stands for a refusal."""


def _states(candidate: Candidate) -> tuple[int, ...]:
    """What of a candidate decides what is held from step to step."""
    switches = ("optimizer", "state", "sharing", "precision", "method", "in_backward")
    return tuple(candidate.strength(switch) for switch in switches)


def _strongest_by_states(candidates: Iterable[Candidate]) -> dict[tuple[int, ...], Candidate]:
    """Of those with the same states the one that goes furthest on the other switches: where it fails, all do."""
    found: dict[tuple[int, ...], Candidate] = {}
    for candidate in candidates:
        best = found.setdefault(_states(candidate), candidate)
        if sum(o.strength for o in candidate.options) > sum(o.strength for o in best.options):
            found[_states(candidate)] = candidate
    return found


def _holds_as_much(other: Candidate, candidate: Candidate) -> bool:
    """Whether what one holds beside states tells of a candidate, which shares its states as far or further."""
    same = ("precision", "method", "in_backward")
    alike = all(other.strength(switch) == candidate.strength(switch) for switch in same)
    return alike and all(other.strength(switch) <= candidate.strength(switch) for switch in ("state", "sharing"))


def _saved_bytes(other: Candidate, candidate: Candidate, peak: Peak) -> int:
    """The most that a candidate can save of the `peak` of another one by the switches on which it goes further."""
    kinds = {"activations": ACTIVATIONS, "loss_chunk": LOGITS}
    further = (kind for switch, kind in kinds.items() if candidate.strength(switch) > other.strength(switch))
    return sum(peak.by_category.get(kind, 0) for kind in further)


def _sums_gradients(candidate: Candidate) -> bool:
    """Whether the traced steps meet gradients of an earlier micro-batch."""
    return any(len(step) > 1 for step in candidate.run.steps)


def _most_tokens(candidate: Candidate) -> int:
    """Tokens of the largest micro-batch."""
    return max(shape.rows * shape.length for step in candidate.run.steps for shape in step)
