"""Search for changes with which a run fits: the least harmful to learning first, then the fastest.

Combinations are grouped by their effect on learning. Within a group they are tried in the order of their predicted
slowdown; ties go to the easier change. So the first one that fits has no unnecessary switch. A group whose strongest
combinations do not fit is skipped. A more harmful group is tried only for combinations that are faster than those
found, and shorter rows only if nothing else fits.

A trace takes seconds, so lower bounds rule out most combinations without one: a combination needs at least the memory
besides states that a traced combination needs, less what it can save of it, in proportion to the tokens of a
micro-batch. The first combination that fits with recomputed layers is tried with fewer of them, which is faster.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cuda_memory.units import GIB
from lean_finetune.core.errors import UserError
from lean_finetune.core.progress import progress_bar
from lean_finetune.memory.advice.run import Run
from lean_finetune.memory.advice.search_space import Candidate, Space, switch_names
from lean_finetune.memory.advice.step_cost import Costs
from lean_finetune.memory.predict.peak import Prediction
from lean_finetune.memory.switches.all_switches import SWITCHES
from lean_finetune.memory.switches.switch import (
    EFFECTS,
    LESS_DATA,
    SAME,
    Switch,
    different,
    flags_of,
    set_options,
    setting_with,
)
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


@dataclass(frozen=True, kw_only=True)
class Fitting(Candidate):
    """A candidate that fits, with the prediction that its own verdict accepts."""

    prediction: Prediction


Confirm = Callable[[Candidate, int], Prediction | None]
"""From a candidate and its traced peak (0: not traced): the prediction by which it fits; None if it does not."""


def advise(run: Run, costs: Costs, *, peak: Peak, usable_bytes: int, confirm: Confirm) -> list[Remedy]:
    """The best few changes with which a run fits; empty if none is found.

    The predicted `peak` of `run` is more than `usable_bytes`, the largest with which it fits, without its margin.
    `confirm` checks a candidate before it is offered.
    """
    search = _Advice(Space(run, costs), usable_bytes, confirm, most_traces=MOST_TRACES)
    search.traced[()] = (search.space.unchanged, peak)
    search.find()
    return search.remedies


REFUSED = Peak(bytes=1 << 62, by_category={})
"""The peak of a candidate that cannot be traced: it fits no device."""


def predicted(candidate: Candidate) -> Peak:
    """The predicted peak of a candidate; `REFUSED` if it cannot be traced."""
    try:
        return candidate.run.predict().peak
    except UserError:  # For example, GPUs that cannot share the model in this way.
        return REFUSED


class Search:
    """Tries candidates in order, and collects those that fit. It knows by bounds which of them cannot.

    A search says which candidates are `alike`, when it is `done`, and whether one more `adds` anything.
    """

    def __init__(self, space: Space, usable_bytes: int, confirm: Confirm, *, most_traces: int):
        """Begin without any trace.

        Args:
            space: the candidates.
            usable_bytes: the most with which the run fits that they change, without its margin.
            confirm: the verdict on a candidate.
            most_traces: for the progress bar.
        """
        self.space, self.run, self.costs, self.confirm = space, space.run, space.costs, confirm
        self._usable, self._margin = usable_bytes, self.run.margin
        self.traced: dict[tuple[str, ...], tuple[Candidate, Peak]] = {}
        self.found: list[Fitting] = []
        self.refused: set[tuple[str, ...]] = set()
        progress = self.run.params.run.progress
        self.bar = progress_bar(total=most_traces, desc="advice", unit=" traces", disable=not progress)

    @property
    def done(self) -> bool:
        """Whether to try no more."""
        raise NotImplementedError

    def alike(self, candidate: Candidate) -> tuple[int, ...]:
        """What it has in common with candidates none of which fits if the strongest one does not."""
        raise NotImplementedError

    def adds(self, candidate: Candidate) -> bool:
        """Whether it is worth offering beside those found."""
        raise NotImplementedError

    def fits_among(self, candidate: Candidate, alike: Sequence[Candidate]) -> bool:
        """Whether it fits; a search may trace another one of `alike` first."""
        return self.fits(candidate)

    def try_in_order(self, candidates: Iterable[Candidate], among: Iterable[Candidate]) -> None:
        """Offer the candidates that fit, until the search is done. `among`: these and other candidates like them."""
        groups: dict[tuple[int, ...], list[Candidate]] = {}
        for one in among:
            groups.setdefault(self.alike(one), []).append(one)
        for one in candidates:
            if self.done:
                return
            alike = groups[self.alike(one)]
            possible = self.may_fit(one) and self.fits(max(alike, key=lambda other: other.total_level))
            if possible and self.adds(one) and self.fits_among(one, alike):
                self.offer(one)

    def offer(self, one: Candidate, *, fewer: bool = True) -> None:
        """Add a candidate that fits if its verdict accepts it.

        With `fewer`, a faster one with fewer recomputed layers takes its place if that fits too.
        """
        faster = (other for other in fewer_recomputed(self, one) if self.space.allows(other.flags)) if fewer else ()
        for other in faster:
            if (prediction := self.confirm(other, 0)) is not None:
                self.found.append(Fitting(**vars(other), prediction=prediction))
                return
        if one.flags not in self.refused:
            if (prediction := self.confirm(one, self.peak_bytes(one))) is None:
                self.refused.add(one.flags)
            else:
                self.found.append(Fitting(**vars(one), prediction=prediction))

    def fits(self, candidate: Candidate) -> bool:
        """Whether a candidate fits, by a trace if no bound rules it out."""
        return self.may_fit(candidate) and self.peak_bytes(candidate) <= self.most_bytes(candidate)

    def may_fit(self, candidate: Candidate) -> bool:
        """Whether neither a bound nor a stronger candidate that does not fit rules it out."""
        if candidate.flags in self.traced:
            return True
        most = self.most_bytes(candidate)
        stronger = any(peak.bytes > most and other.covers(candidate) for other, peak in self.traced.values())
        return not stronger and self.bound(candidate) <= most

    def most_bytes(self, candidate: Candidate) -> int:
        """The largest predicted peak with which a candidate fits: another one than the run's if its margin differs."""
        if candidate.run.margin is self._margin:
            return self._usable
        usable = self._usable if self._margin is None else self._margin.with_margin(self._usable)
        return usable if candidate.run.margin is None else candidate.run.margin.most_bytes(usable)

    def known_peak(self, candidate: Candidate) -> Peak:
        """Its predicted peak, which is not noted: bounds know no candidate between two options of a switch."""
        known = self.traced.get(candidate.flags)
        return predicted(candidate) if known is None else known[1]

    def peak_bytes(self, candidate: Candidate) -> int:
        """Its predicted peak; more than any device has if it cannot be traced."""
        if candidate.flags not in self.traced:
            peak = predicted(candidate)
            self.traced[candidate.flags] = (candidate, peak)
            self.bar.update()
        return self.traced[candidate.flags][1].bytes

    def bound(self, candidate: Candidate) -> int:
        """Lower bound of a candidate's peak from its states and from traced candidates."""
        setting = candidate.run.setting
        least, gradients = self.costs.least_bytes(setting), self.costs.gradient_bytes(setting)
        states = least + self.costs.gathered_bytes(setting)
        bounds = [least, states - (0 if candidate.sums_gradients else gradients)]
        for other, peak in self.traced.values():
            if peak is REFUSED or not _bounds(other, candidate):
                continue
            beside = peak.bytes - self.costs.least_bytes(other.run.setting)
            beside -= self.costs.gathered_bytes(other.run.setting) + _most_saved_bytes(other, candidate, peak)
            both = other.sums_gradients and candidate.sums_gradients
            if not other.sums_gradients:
                beside += self.costs.gradient_bytes(other.run.setting)
            share = min(1.0, candidate.most_tokens / other.most_tokens)
            bounds.append(states - (0 if both else gradients) + int(share * beside))
        return max(bounds)


def _bounds(other: Candidate, candidate: Candidate) -> bool:
    """Whether the memory of one candidate besides its states bounds that of another one."""

    def bounded(switch: Switch) -> bool:
        weaker, stronger = other.level(switch.name), candidate.level(switch.name)
        if switch.other_memory == "unknown":
            return weaker == stronger
        return switch.other_memory == "same" or weaker <= stronger

    # The memory of a tower grows with patches, not with tokens.
    return other.attached == candidate.attached and all(map(bounded, SWITCHES))


def _most_saved_bytes(other: Candidate, candidate: Candidate, peak: Peak) -> int:
    """The most that a candidate can save of another one's `peak` with switches that reduce only one category."""
    stronger = (s for s in SWITCHES if s.saves and candidate.level(s.name) > other.level(s.name))
    return sum(peak.by_category.get(switch.saves or "", 0) for switch in stronger)


# Recompute only as many layers as the device needs (train.grad_ckpt_policy=first_n).
#
# A peak is nearly a line in the number of recomputed layers: each layer that is not recomputed stores its activations.
# So the peaks of none and of all layers give the fewest that may fit, which a trace of all layers then confirms.

TRIES = 2
"""Numbers of layers that are tried: the one that follows from the line, and one somewhat larger."""
WORTH = 0.98
"""Share of a candidate's time that fewer recomputed layers must at most need."""


def fewer_recomputed(search: Search, one: Candidate) -> Iterator[Candidate]:
    """Faster candidates that recompute whole layers, and fewer than `one`, or instead of its tiles; the fastest first.

    Whether they fit is for the caller to confirm.
    """
    train, layers = one.run.setting.train, one.run.config.get_text_config().num_hidden_layers
    stored_elsewhere = (train.offload_activations, train.compress_activations) != ("none", "none")
    recomputes = (train.grad_ckpt and train.grad_ckpt_policy in ("full", "selective")) or train.sequence_tiles
    if not recomputes or stored_elsewhere or one.run.setting.is_pipeline:
        return
    none, every = (search.known_peak(with_recomputed(search, one, count)) for count in (0, layers))
    if REFUSED in (none, every) or none.bytes <= every.bytes:
        return
    fewest = max(1, math.ceil((none.bytes - search.most_bytes(one)) / ((none.bytes - every.bytes) / layers)))
    for count in (fewest + number * max(1, layers // 16) for number in range(TRIES)):
        fewer = with_recomputed(search, one, count)
        if count < layers and fewer.slowdown < WORTH * one.slowdown:
            yield fewer


def with_recomputed(search: Search, one: Candidate, count: int) -> Candidate:
    """The candidate with its first `count` layers recomputed, which may be none or all, and without tiles."""
    first_n = 0 < count < one.run.config.get_text_config().num_hidden_layers
    start = search.run.setting
    wanted = {
        "train.grad_ckpt": count > 0,
        "train.grad_ckpt_policy": "first_n" if first_n else "full",
        "train.grad_ckpt_layers": count if first_n else None,
    }
    values = different(start, wanted)
    layers, tiles = (switch_names().index(name) for name in ("activations", "tiles"))
    options = list(one.options)
    options[layers] = replace(options[layers], values=values, flags=flags_of(values))
    options[tiles] = replace(options[tiles], values={}, flags=(), effect=SAME, ease=0, level=0)
    without_tiles = {"train.sequence_tiles": start.train.sequence_tiles}
    run = replace(one.run, setting=setting_with(one.run.setting, {**wanted, **without_tiles}))
    work = one.slowdown / search.costs.slowdown(one.run)  # Of its micro-batches.
    return replace(one, options=tuple(options), run=run, slowdown=work * search.costs.slowdown(run))


class _Advice(Search):
    """The search of `advise`."""

    _before, _last = 0, MOST_TRACES

    def find(self) -> None:
        """Search group by group, the least harmful to learning first."""
        with self.bar:
            for effect in range(len(EFFECTS)):
                if self._open and not (effect == LESS_DATA and self.found):
                    self._search_group(self.space.of_effect(effect))

    @property
    def _open(self) -> bool:
        """Whether to continue with another group."""
        confirmed = len(self.refused) + len(self.found)
        return len(self.found) < MOST_FOUND and confirmed < MOST_CONFIRMED and self._traces < MOST_TRACES

    @property
    def done(self) -> bool:
        """Whether this group has been tried."""
        in_group = len(self.found) - self._before
        return not self._open or self._traces >= self._last or in_group >= MOST_FOUND_IN_GROUP

    @property
    def _traces(self) -> int:
        """Number of traces, without the trace of the original run."""
        return len(self.traced) - 1

    @property
    def remedies(self) -> list[Remedy]:
        """What fits, in the order of candidates."""
        return [self._remedy(one) for one in sorted(self.found, key=lambda one: one.order)]

    def _remedy(self, one: Fitting) -> Remedy:
        """A candidate with its price."""
        host_bytes, disk_bytes = self.costs.offloaded_bytes(one.run.setting)
        return Remedy(
            flags=one.flags,
            peak_bytes=one.prediction.peak.bytes,
            slowdown=one.slowdown,
            effect=one.effect_text,
            host_bytes=host_bytes,
            disk_bytes=disk_bytes,
            step_seconds=self.costs.step_time(one.run),
        )

    def _search_group(self, candidates: Sequence[Candidate]) -> None:
        """Find the candidates of a group that fit without unnecessary switches."""
        fastest = min((one.slowdown for one in self.found), default=None)
        wanted = [c for c in candidates if fastest is None or c.slowdown < FASTER * fastest]
        fitting = [candidate for candidate in self._strongest(wanted) if fastest is None and self.fits(candidate)]
        if fastest is None and not fitting:
            return
        self._before, self._last = len(self.found), self._traces + MOST_TRACES_IN_GROUP
        self.try_in_order(wanted, candidates)
        if len(self.found) == self._before and fastest is None:
            strongest = min(fitting, key=lambda candidate: candidate.order)
            self.offer(self._lightened(strongest, candidates, self._traces + LIGHTENING_TRACES))
            if self.adds(strongest):
                self.offer(strongest)

    def alike(self, candidate: Candidate) -> tuple[int, ...]:
        """Levels of the switches that change weights, gradients or optimizer state."""
        return tuple(candidate.level(switch.name) for switch in SWITCHES if switch.changes_states)

    def offer(self, one: Candidate, *, fewer: bool = True) -> None:
        """See the base class. Only the first one found recomputes fewer layers."""
        super().offer(one, fewer=not self.found)
        self._last = min(self._traces + TRACES_BEYOND, MOST_TRACES)

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

    def adds(self, candidate: Candidate) -> bool:
        """Whether it changes less than what is found, or leaves room that the only candidate of its group does not."""
        covered = [one for one in self.found if candidate.covers(one)]
        if not covered:
            return True
        tight = all(one.prediction.peak.bytes > ROOMY * self.most_bytes(one) for one in self.found)
        roomy = ROOMY * self.most_bytes(candidate)
        return (
            tight
            and covered == self.found[self._before :]
            and self.bound(candidate) <= roomy
            and self.fits(candidate)
            and self.peak_bytes(candidate) <= roomy
        )
