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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cuda_memory.units import GIB
from lean_finetune.core.errors import UserError
from lean_finetune.core.progress import progress_bar
from lean_finetune.memory.advice.run import Run
from lean_finetune.memory.advice.search_space import Allowed, Candidate, Space, switch_names
from lean_finetune.memory.advice.step_cost import Costs
from lean_finetune.memory.advice.switch import EFFECTS, LESS_DATA, SAME, Switch, flags_of, set_options
from lean_finetune.memory.advice.switches import SWITCHES, different, setting_with
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


Confirm = Callable[[Candidate, int], int | None]
"""From a candidate and its traced peak: the peak that the caller's verdict would report; None if it would not fit."""


def advise(
    run: Run,
    costs: Costs,
    *,
    peak: Peak,
    usable_bytes: int,
    confirm: Confirm | None = None,
) -> list[Remedy]:
    """The best few changes with which a run fits; empty if none is found.

    The predicted `peak` of `run` is more than `usable_bytes`, the largest with which it fits, without its margin.
    `confirm` checks a candidate before it is offered.
    """
    space = Space(run, costs)
    search = _Search(run, costs, usable_bytes, space.allows, confirm)
    search.traced[space.unchanged.flags] = (space.unchanged, peak)
    with search.bar:
        for effect in range(len(EFFECTS)):
            if search.open and not (effect == LESS_DATA and search.found):
                search.search_group(space.of_effect(effect))
    return search.found


REFUSED = Peak(bytes=1 << 62, by_category={})
"""The peak of a candidate that cannot be traced: it fits no device."""


def predicted(candidate: Candidate) -> Peak:
    """The predicted peak of a candidate; `REFUSED` if it cannot be traced."""
    try:
        return candidate.run.predict().peak
    except UserError:  # For example, GPUs that cannot share the model in this way.
        return REFUSED


class Tracer:
    """Traces candidates, and knows by bounds which of them cannot fit."""

    def __init__(self, run: Run, costs: Costs, usable_bytes: int, *, most_traces: int):
        """`usable_bytes`: the most with which `run` fits, without its margin. `most_traces`: for the progress bar."""
        self.run, self.costs, self._usable, self._margin = run, costs, usable_bytes, run.margin
        self.traced: dict[tuple[str, ...], tuple[Candidate, Peak]] = {}
        self.bar = progress_bar(total=most_traces, desc="advice", unit=" traces", disable=not run.params.run.progress)

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


def fewer_recomputed(tracer: Tracer, one: Candidate) -> Iterator[Candidate]:
    """Faster candidates that recompute whole layers, and fewer than `one`, or instead of its tiles; the fastest first.

    Whether they fit is for the caller to confirm.
    """
    train, layers = one.run.setting.train, one.run.config.get_text_config().num_hidden_layers
    stored_elsewhere = (train.offload_activations, train.compress_activations) != ("none", "none")
    recomputes = (train.grad_ckpt and train.grad_ckpt_policy in ("full", "selective")) or train.sequence_tiles
    if not recomputes or stored_elsewhere or one.run.setting.is_pipeline:
        return
    none, every = (tracer.known_peak(with_recomputed(tracer, one, count)) for count in (0, layers))
    if REFUSED in (none, every) or none.bytes <= every.bytes:
        return
    fewest = max(1, math.ceil((none.bytes - tracer.most_bytes(one)) / ((none.bytes - every.bytes) / layers)))
    for count in (fewest + number * max(1, layers // 16) for number in range(TRIES)):
        fewer = with_recomputed(tracer, one, count)
        if count < layers and fewer.slowdown < WORTH * one.slowdown:
            yield fewer


def with_recomputed(tracer: Tracer, one: Candidate, count: int) -> Candidate:
    """The candidate with its first `count` layers recomputed, which may be none or all, and without tiles."""
    first_n = 0 < count < one.run.config.get_text_config().num_hidden_layers
    start = tracer.run.setting
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
    work = one.slowdown / tracer.costs.slowdown(one.run)  # Of its micro-batches.
    return replace(one, options=tuple(options), run=run, slowdown=work * tracer.costs.slowdown(run))


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
            traced_bytes = self.known_peak(fewer).bytes if self._confirm is None else 0  # A confirmation traces it.
            if (peak_bytes := self._confirmed(fewer, traced_bytes)) is not None:
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
