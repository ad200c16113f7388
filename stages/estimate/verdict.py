"""Whether a run fits its device, and what would make it fit."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stages.estimate.devices import Device
from stages.estimate.predict import Prediction
from stages.estimate.switches import Switch
from stages.units import readable_size

LARGEST_CATEGORIES = 3
MOST_REMEDIES = 3
NO_REMEDY = "no single switch makes it fit: combine several or choose a larger device"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What train obeys. It says nothing of the device when the run fits, so another device does not retrain."""

    enforce: bool
    """Whether train obeys."""
    fits: bool
    refusal: str | None
    """One line: prediction, capacity, where the bytes are, what would fit; None when the run fits."""

    def as_json(self) -> dict[str, Any]:
        """The content of verdict.json; nothing in it varies with the device unless the run is refused."""
        return {"enforce": self.enforce, "refusal": self.refusal if self.enforce else None}


def usable_bytes(device: Device, headroom_percent: float) -> int:
    """The device's memory less what is kept free."""
    return int(device.memory_bytes * (1.0 - headroom_percent / 100.0))


def judge(
    prediction: Prediction, device: Device, switches: Sequence[Switch], *, headroom_percent: float, enforce: bool
) -> Verdict:
    """Hold a prediction against a device; of the `switches` traced too, those that would fit become remedies."""
    usable = usable_bytes(device, headroom_percent)
    if prediction.peak.bytes <= usable:
        return Verdict(enforce=enforce, fits=True, refusal=None)
    by_size = sorted(prediction.peak.by_category.items(), key=lambda item: (-item[1], item[0]))
    largest = ", ".join(f"{category} {readable_size(size)}" for category, size in by_size[:LARGEST_CATEGORIES])
    fitting = [f"-S {s.flag} ({readable_size(s.peak_bytes)})" for s in switches if s.flag and s.peak_bytes <= usable]
    remedy = f"would fit: {', '.join(fitting[:MOST_REMEDIES])}" if fitting else NO_REMEDY
    capacity = f"{readable_size(device.memory_bytes)} less {headroom_percent:g}%"
    refusal = (
        f"hardware.gpu: predicted peak {readable_size(prediction.peak.bytes)} (in {prediction.worst_phase}) exceeds "
        f"the {readable_size(usable)} usable on {device.name} ({capacity}); largest: {largest}; {remedy}"
    )
    return Verdict(enforce=enforce, fits=False, refusal=refusal)
