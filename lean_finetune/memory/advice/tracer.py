"""Traces of combinations of switches, and bounds that rule combinations out without a trace.

A trace takes seconds. A combination needs at least the memory besides states that a traced combination needs, less what
it can save of it, in proportion to the tokens of a micro-batch.
"""

from lean_finetune.core.errors import UserError
from lean_finetune.core.progress import progress_bar
from lean_finetune.memory.advice.run import Run
from lean_finetune.memory.advice.search_space import Candidate
from lean_finetune.memory.advice.step_cost import Costs
from lean_finetune.memory.advice.switch import Switch
from lean_finetune.memory.advice.switches import SWITCHES
from lean_finetune.memory.trace.memory_trace import Peak

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
    return other.images == candidate.images and all(map(bounded, SWITCHES))


def _most_saved_bytes(other: Candidate, candidate: Candidate, peak: Peak) -> int:
    """The most that a candidate can save of another one's `peak` with switches that reduce only one category."""
    stronger = (s for s in SWITCHES if s.saves and candidate.level(s.name) > other.level(s.name))
    return sum(peak.by_category.get(switch.saves or "", 0) for switch in stronger)
