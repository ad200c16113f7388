"""Whether a run fits its device, and what would make it fit."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from stages.estimate.advice import Remedy
from stages.estimate.devices import Device
from stages.estimate.predict import Prediction
from stages.params import Precision
from stages.step.batches import BatchShape
from stages.units import readable_size

LARGEST_CATEGORIES = 3
MOST_REMEDIES = 3
TIGHT = " of headroom, without which it would fit"
NO_REMEDY = "no change of the known switches makes it fit: choose a larger device"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What train obeys. It says nothing of the device when the run fits, so another device does not retrain."""

    enforce: bool
    """Whether train obeys."""
    state: Literal["fits", "tight", "does not fit"]
    """Tight: it fits the device, but not with the headroom left free; train refuses that too."""
    refusal: str | None
    """One line: prediction, capacity, where the bytes are, what would fit; None when the run fits."""

    @property
    def fits(self) -> bool:
        """Whether it fits with the headroom."""
        return self.state == "fits"

    def as_json(self, precision: Precision | None) -> dict[str, Any]:
        """The content of verdict.json; nothing in it varies with the device unless the run is refused.

        `precision` is what train.precision=auto means on the device, None where the user chose.
        """
        told = {"enforce": self.enforce, "refusal": self.refusal if self.enforce else None}
        return told if precision is None else {**told, "precision": precision}


def usable_bytes(device: Device, headroom_percent: float) -> int:
    """The device's memory less what is kept free."""
    return int(device.memory_bytes * (1.0 - headroom_percent / 100.0))


def judge(
    prediction: Prediction, device: Device, remedies: Sequence[Remedy], *, headroom_percent: float, enforce: bool
) -> Verdict:
    """Hold a prediction against a device; `remedies` are told, best first, where the run does not fit."""
    usable = usable_bytes(device, headroom_percent)
    if prediction.peak.bytes <= usable:
        return Verdict(enforce=enforce, state="fits", refusal=None)
    by_size = sorted(prediction.peak.by_category.items(), key=lambda item: (-item[1], item[0]))
    largest = ", ".join(f"{category} {readable_size(size)}" for category, size in by_size[:LARGEST_CATEGORIES])
    told = [f"{r.switches} ({readable_size(r.peak_bytes)}, {r.slowdown:.2f}x time)" for r in remedies[:MOST_REMEDIES]]
    remedy = f"would fit: {'; '.join(told)}" if told else NO_REMEDY
    tight = prediction.peak.bytes <= device.memory_bytes
    capacity = f"{readable_size(device.memory_bytes)} less {headroom_percent:g}%{TIGHT if tight else ''}"
    refusal = (
        f"hardware.gpu: predicted peak {readable_size(prediction.peak.bytes)} (in {prediction.worst_phase}"
        f"{_first_failure(prediction, usable)}) exceeds the {readable_size(usable)} usable on {device.name} "
        f"({capacity}); largest: {largest}; {remedy}"
    )
    return Verdict(enforce=enforce, state="tight" if tight else "does not fit", refusal=refusal)


def _first_failure(prediction: Prediction, usable: int) -> str:
    """Where the run would stop: the first phase above what is usable, and the micro-batch that is in work then."""
    phase = next(phase for phase, peak in prediction.by_phase.items() if peak.bytes > usable)
    told = "" if phase == prediction.worst_phase else f", too much from {phase} on"
    return f"{told}, micro-batch of {describe(prediction.steps_of_peak[-1][-1])}"


def describe(shape: BatchShape) -> str:
    """A micro-batch in a few words."""
    if shape.joined_lengths is not None:
        return f"{len(shape.joined_lengths)} rows joined to {shape.length} tokens"
    return f"{shape.rows} x {shape.length} tokens"
